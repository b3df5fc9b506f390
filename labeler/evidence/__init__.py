"""Evidence: what was asked of private records, what it cost and how that is proved, in one document to be checked.

    document    its fields, and which of them are facts of a journal and which follow from them
    derive      everything that follows from the facts, computed anew by whoever makes or checks a document, and
                whether a document is what its own facts, and a journal's, say; which field is not

Reading a journal for it, signing it and the same as a page to print lie above (`labeler.ledger.evidence`,
`feature_store.results`).
"""
