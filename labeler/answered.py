"""What an agent keeps to for every round it was charged for, and the sentences with which it refuses.

An answer is computed once. Its bytes are stored, durably, before the first of them leaves, and whoever asks again is
sent the stored bytes, whatever the records are by then. Once no tallier can miss them they are erased, with the round's
key, and the round is refused for ever. So what a round shows of an agent follows from one version of its records, for
which it was charged, and from public things: who asks, for whom, when, and whether everything has arrived. That an
answer was computed again after a crash between the charge and the storing changes nothing of it: nothing had left.

Every sentence here is the same whether records have changed or not.
"""

from __future__ import annotations

from typing import Final

Recipients = tuple[tuple[str, str], ...]
"""Who gets the shares of an answer: id and public sealing key of each tallier, in tallier order.

Shares of one answer always go to the same talliers in the same order. The split is a function of the round, so in
another order one tallier would see another share of the same split, and with all of them the noised ballot itself.
Another set of talliers could sum the round over other agents under the same noise.
"""

IN_PROCESS: Final[Recipients] = ()
"""The recipients where talliers are objects of the same process, handed their shares by number."""

NOT_KEPT: Final = (
    "this agent was charged for this round before and keeps nothing of it any more: every tallier has confirmed it, or "
    "its deadline has passed. It is not answered again; ask in a new task (a new nonce), which is charged anew"
)
"""Why a round is refused once its key is erased."""

ANSWERED_TO_OTHERS: Final = (
    "this round was answered for other talliers, other keys of theirs, or in another order; shares of the same answer "
    "sent elsewhere could be put together. What was stored for the old ones is void and is never sealed anew. Ask in a "
    "new task (a new nonce), which is charged anew"
)
"""Why a round is refused for other recipients than those who got its shares."""
