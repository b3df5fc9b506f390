"""Noise that the talliers add instead of the agents, once for each round and set of contributors.

**What runs.** A task with `dishonest_talliers = d` (1 or 2 of its three) has agents that share their bare ballots.
Each tallier adds, to its share of the sum over the contributors, its own independent draw of the discrete Gaussian of
parameter s = S sigma / sqrt(3 - d) per number: variance sigma^2 / 2 each where at most one tallier is dishonest,
sigma^2 each against two; 3 sigma^2 / (3 - d) in all, however many agents collude or drop out.

**Theorem.** Whoever controls or reads d talliers, all agents but the one asked about, the coordinator and every wire
learns of that agent no more than from the sum with h = 3 - d such draws in it: the `IntegerSum` of the task, whose
proof (`labeler.accounting.integer`) is about any h independent shares and does not ask who draws them.

*Proof.* Let D be the dishonest talliers and H the honest ones. What controlled agents send is known to the adversary:
leave it out, so that x is the sum over the other contributors, on the grid. Each of these splits its ballot once,
into three words uniform but for their sum (`labeler.sharing`), so what D holds is uniform, whatever the ballots are.
An honest tallier sends one array of numbers per round, a_i + n_i, with a_i its share of the sum over one set of
contributors. Where all of H have one set, the a_i of H are uniform but for adding up to x less what D holds; so the
a_i + n_i of H are uniform but for adding up to x + sum_H n_i less what D holds: all of it can be made, without the
ballots, from uniform words and from y = x + sum_H n_i modulo the number of words, which is the integer sum with h
draws, reduced: post-processing. Where two of H were asked for different sets (h = 2), a share in one of the a_i has
its counterpart in no other, and is uniform given all else; then what H sends is uniform and says nothing. What D
sends (an offset of any size, chosen after seeing all there is) is a function of what it knows: post-processing of y,
and so are sums that wrap around. QED

**Models.** The proof uses of x that it is a sum of one integer vector per agent, fixed before anything is drawn, and
of the price that it is the integer sum's for the distance such vectors move: nothing of counts. So the weights of
blind-average, on their grid (`labeler.vector_sum`), go the same way at the same price. Not aux-distill: there an
agent's noise is in its heads, and what it answers is a function of them that is not linear, so that no noise added to a
sum of answers has the law of what it sends, nor covers what bare heads would tell.

**Once.** A second draw over the same set would let two sums be averaged, and a sum over another set would differ from
the first by single ballots. So a tallier sums a round over one set, for ever (`labeler.rounds.tallier`); its noise is
a function of a key of the round, which is durable before the first share is, and of the contributors; and the sum is
durable with its noise before a byte of it leaves. Asked again it sends the stored bytes; killed between adding and
storing, it draws the same noise again. The key is the one under which the round's shares lie (erased once the sum is
stored), so whoever has lost it can neither add nor draw.

**Winners.** They are computed from the three noisy shares and are post-processing of y, so that what the sums cost
covers them, whatever a dishonest tallier adds and whether or not a sum wraps around in the field. The certified price
of winners (`labeler.accounting.winner`) needs an answer to be a threshold on the changed count. With offsets of any
size the counts that answer a class are an arc of the field, which may begin and end within the count's reach, so that
the answer is two thresholds at once; and no range check mends it: only who sees the sums can tell that one is out of
range, and nobody does. So winners of such a task are charged as the sums they are read from
(`labeler.methods.winners`).

References: PRIVACY section 12; Dwork, Kenthapadi, McSherry, Mironov, Naor 2006 (noise by the parties that compute).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from labeler.randomness import ByteSource

TALLIERS: Final = 3
"""How many talliers there must be: with two, against one dishonest of them, the other would add all the noise."""

NoiseBy = Literal["agents", "talliers"]


def noise_source(key: bytes, round_digest: str, contributors: Collection[str], *, is_seeded: bool) -> ByteSource:
    """What one tallier draws its noise of a round from: the same for the same contributors, independent for others.

    Args:
        key: of the round at this tallier; 32 bytes, secret, and at no other tallier the same.
        contributors: the agents summed.
        is_seeded: True where the key came from a known seed.
    """
    # Loaded where it is wanted: a task says who adds noise, and is read where nobody draws any.
    from labeler.randomness import derive_key, keyed_source

    names = json.dumps(sorted(contributors)).encode()
    return keyed_source(derive_key(key, b"tallier noise", round_digest.encode(), names), is_seeded=is_seeded)
