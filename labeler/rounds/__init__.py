"""The round, written once: pure machines of coordinator, agent and tallier. Drivers elsewhere carry out what they want.

`step(state, event, now) -> (state, effects)`, and `resume(state)` gives the same for a process that begins with a
state; no file, clock, thread, network or randomness. An event is what has happened, an effect what is to happen; the
result of an effect comes back as an event.
"""
