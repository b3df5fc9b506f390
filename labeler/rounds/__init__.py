"""The round, written once: pure state machines of coordinator, agent and tallier. Drivers elsewhere run the effects.

`step(state, event, now) -> (state, effects)`; no file, clock, thread, network or randomness. An event is what has
happened, an effect what is to happen; the result of an effect comes back as an event. A process that starts begins with
the durable part of a state and asks for the rest.
"""
