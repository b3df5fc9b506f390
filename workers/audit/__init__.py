"""`labeler audit`: attacks on the real pipeline, and what they prove about a task's promise.

adversaries   who attacks: which records and which questions it chooses (Chadha et al., ICML 2024); the registry
poison        records and questions made for one method, so that a canary moves as much as anything can
worlds        shards with and without canaries, equal in everything else
pipeline      one life of the task: the coordinator's driver, agents, talliers, noise; as `labeler run` does it
observers     what an adversary makes of what it sees: a score, high where the canary took part
record        what was counted, durable run by run
run           many runs and one run, and the document
page          the document as a page
"""
