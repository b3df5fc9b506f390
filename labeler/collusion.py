"""Against whom a price holds: how many participants may know their own noise, and what a number is worth if more do.

**Who knows what.** Every contributor adds an independent share of variance s^2 = sigma^2 / h to the sum, with
h = N - colluding_agents - max_dropouts (labeler.task), and a contributor knows its own share. A reader of the release
who takes part subtracts it, without colluding with anybody. So with c = `colluding_agents` a price holds against c
participants who read the release: one reader who takes part *or* one colluder of a reader who does not needs c = 1, a
reader who takes part and has a colluder needs c = 2.

**What is left.** Let m participants know their shares, and ask about a record of somebody else. A release is a sum over
at least q = N - max_dropouts contributors, or nothing. If the record's owner is not among them, nothing of the record
is in it. If it is, its own share is unknown, and so are those of all contributors but the m: at least
max(1, q - m) shares of variance s^2, independent of the record and of what the m know. Replacing h by this number in
the event (labeler.accounting) therefore gives a certified price against m participants; for noise of real numbers mu
grows by sqrt(h / max(1, q - m)), which for c = max_dropouts = 0 and m = 1 is sqrt(N / (N - 1)).

**Where the talliers add the noise** (labeler.tallier_noise) no participant knows any of it: the number is the same
against all participants together, and against as many talliers as the task says.

Where each agent adds all the noise that its price needs by itself (h = 1, or a method with noise of its own), the
number is the same against all other participants together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labeler.epsilon_words import say_epsilon
from labeler.errors import InvalidTask
from labeler.methods import METHODS, Method

if TYPE_CHECKING:
    from labeler.task import Task


def resolve_colluding_agents(
    given: int | None,
    *,
    agents: int,
    max_dropouts: int = 0,
    method: Method = "knn",
    dishonest_talliers: int | None = None,
) -> int:
    """The number of colluding agents of a new task: what was said, else 1 where there are two agents or more.

    Where the talliers add the noise: else all but the one that a number is about, since it costs nothing there.

    For the doors at which tasks are made. A task that is stored keeps what it says.

    Args:
        given: what the user said; None for nothing. 0 is kept: the price then says for whom it does not hold.
        agents: N, how many take part.
        max_dropouts: how many of them may fail to answer.
        method: how they answer.
        dishonest_talliers: where the talliers add the noise; None where agents do.

    Raises:
        InvalidTask: the default leaves nobody whose noise is unknown (two agents, one of which may be missing).
    """
    if given is not None:
        return given
    if dishonest_talliers is not None:
        return max(0, agents - 1)
    usual = 1 if agents >= 2 else 0
    if usual == 0 or max_dropouts != agents - 1:
        return usual
    if METHODS[method].has_local_noise:
        return 0
    raise InvalidTask(
        f"of {agents} agents {max_dropouts} may be missing, and unless the task says otherwise one participant may "
        "know its own noise, because it reads the release or colludes: that leaves nobody whose noise is unknown. "
        "Let more agents take part, lower max_dropouts, or say colluding_agents = 0: a single agent may then be all "
        "that answers, so each adds all the noise that the price counts on"
    )


def shares_left(task: Task, participants: int) -> int:
    """Fewest noise shares unknown to so many participants in any sum that holds a ballot of somebody else.

    See the module for the proof.
    """
    if task.traits.has_local_noise:
        return 1
    if task.noise_by == "talliers":
        return task.noise_contributors
    return max(1, task.quorum - participants)


def holds_against(
    task: Task,
    participant_epsilon: float | None,
    histogram_epsilon: float | None = None,
    *,
    two_talliers_epsilon: float | None = None,
) -> str:
    """For whom a price holds, in plain words.

    Args:
        task: whose price.
        participant_epsilon: the instance-level price against one participant who reads the release; None where there
            is none.
        histogram_epsilon: the instance-level price of the sums that winners are read from, where winners cost less.
        two_talliers_epsilon: the instance-level price against two dishonest talliers, where the task counts on one at
            most and there is a bound.
    """
    if task.dishonest_talliers is not None:
        return _of_talliers_noise(task, task.dishonest_talliers, two_talliers_epsilon)
    return _readers(task, participant_epsilon) + (
        ""
        if histogram_epsilon is None
        else " It counts on talliers that keep to the computation and do not pool what they hold; those that do not "
        f"learn at most the noisy sums, and then epsilon is {say_epsilon(histogram_epsilon)} per private image."
    )


def _of_talliers_noise(task: Task, dishonest: int, two_talliers_epsilon: float | None) -> str:
    many = "one of the three talliers" if dishonest == 1 else "two of the three talliers"
    bare = "the votes" if task.traits.counts else f"every agent's {task.traits.sums}"
    worse = "there is no bound" if two_talliers_epsilon is None else f"epsilon is {say_epsilon(two_talliers_epsilon)}"
    return (
        f"Holds against whoever reads the release, together with all other participants and {many}, who add the noise: "
        "agents add none. "
        + (f"Should two talliers pool what they know, {worse} per private image; " if dishonest == 1 else "")
        + f"{'should' if dishonest == 1 else 'Should'} all three, they read {bare}."
    )


def _readers(task: Task, participant_epsilon: float | None) -> str:
    if task.agents == 1:
        return "Holds against whoever reads the release; one agent takes part, and nobody else knows any of its noise."
    if task.noise_contributors == 1:
        return (
            "Holds against whoever reads the release, together with all other participants: each agent adds all the "
            "noise that the price counts on."
        )
    match task.colluding_agents:
        case 0:
            then = (
                "there is no bound" if participant_epsilon is None else f"epsilon is {say_epsilon(participant_epsilon)}"
            )
            return (
                "Holds against a reader who takes part in no way. A participant who reads the release subtracts its "
                f"own noise: then {then} per private image."
            )
        case 1:
            return "Holds against whoever reads the release and any one participant, who may be the reader."
        case many:
            return f"Holds against whoever reads the release and any {many:,} participants, who may be readers."
