"""`labeler audit`: attacks on the real pipeline, and what they prove about a task's promise.

Read `adversaries` first: who attacks, and the registry to which others are added. Each is prepared from `surroundings`.
`pipeline` is one life of the task, with and without a canary, by the coordinator's driver, agents and talliers, as
`labeler run` does it; `poison` makes records and questions for which a canary moves as much as anything can;
`observers` turn what was seen into a score. `run` counts runs durably, `page` shows what they prove.
"""
