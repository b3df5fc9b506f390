"""A federation in one process under a seeded schedule: crashes, loss and delay, and what has to hold all the while.

A seed makes a case (`case`): who takes part, what is asked, what goes wrong how often. A world (`world`) runs the real
coordinator, agents and talliers over real SQLite journals, one turn of one party after the other as the seed says, in
virtual time; `post` loses, doubles and delays what they say to each other, and any of them dies between any two durable
effects. A witness (`witness`) sees every message and every journal, and ends the schedule at the first thing that must
not happen. Then the faults stop, and every job has to come to an end.

    run_schedule(seed)      one schedule; the same seed is the same schedule
    campaign                many of them, in ranges that can be resumed
"""
