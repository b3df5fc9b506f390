"""`labeler audit`: attacks on the real pipeline, and what they prove about a task's promise.

Read `adversaries` first: who attacks, and the registry to which others are added. Each is prepared from `surroundings`.
`worlds` makes shards with and without a canary, equal in everything else; `poison` makes records and questions for
which a canary moves as much as anything can; `pipeline` is one life of the task, by the coordinator's driver, agents
and talliers, as `labeler run` does it; `observers` turn what was seen into a score; `life` attacks votes for life by a
hundred jobs. `tasks` reads what is audited, `run` counts runs durably, `page` shows what they prove.
"""
