"""Evidence: one document, to be checked, of what was asked of private records, its cost and its proof.

    document    its fields: facts of a journal, and conclusions that follow from them
    derive      everything that follows from the facts, computed again by every maker and checker of a document; and
                whether a document agrees with its own facts, and a journal's, with the fields that do not

Other packages read a journal for it (`labeler.ledger.evidence`), sign it and print it as a page
(`feature_store.results`).
"""
