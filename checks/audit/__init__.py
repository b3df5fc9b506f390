"""`labeler audit`: attacks on the real pipeline, and what they prove about a task's promise.

Read `adversaries` first: the registry of attackers, and `Surroundings`, from which each attack is prepared. `pipeline`
runs one life of the task, with and without a canary. It uses the coordinator's driver, agents and talliers, as `labeler
run` does. `poison` makes records and questions for which a canary moves as much as anything can. `observers` turn what
was seen into a score. `run` counts runs durably and renders the page of what they prove.
"""
