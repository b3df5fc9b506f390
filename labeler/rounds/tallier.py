"""A tallier's part in a round, as a pure state machine: it accepts fixed agents' shares and sums them only once.

            Opened                SharesCame                 SumAsked            Added
    unknown ------> open ------------------------> open ----------------> open ------> fixed
                      |    Hold each, Exclude who            Add them           Fix,     |   asked again for the same:
                      |    sent two, Report                                  then send   |   the same sum is sent again
                      | Expired: Forget                                                  | a week after: Forget
                      v                                                                  v
                  forgotten <------------------------------------------------------- forgotten

The rules, and why they hold for every order of events (proved by reading `step`, tested with random events):

* **One sum.** `contributors` is set once, by the `SumAsked` that `Add` follows, and every later one is compared with
  it: another set is refused permanently. Two sums over different agents would differ by single ballots.
* **Never for fewer than the quorum, never over a share that is not held, never without the head.** `SumAsked` carries
  the entry of the coordinator's ledger that posted the charge, which a `SumRequest` must have. `Add` is asked for only
  over agents of whom exactly one share is held, and over at least the quorum.
* **Durable before it is said.** The effects of `step` are in the order in which they must be durable: `Hold`, `Exclude`
  and `Fix` are stored before `Report`, `SendSum` and `FindWinners` are sent. A driver stores a turn in one transaction.
* **What is not done is said.** This tallier may be unable to open a round, or to make a sum ever (it gave the round up
  and erased its shares, never had it, or summed others). Then it declines for good, and the coordinator's job ends. A
  temporary obstacle (no room now; a sum over an agent that the site names no more) is declined too, and asked for
  again. If a round is open here, an odd opening changes nothing and is not declined: it may be an old message, and the
  sum is still made.
* **One share of each agent.** A second, different one excludes the agent, since nobody can tell which one the other
  talliers hold; the same one again changes nothing, also after the sum.

* **One draw of noise.** If the talliers add the noise (labeler.noise), `Add` draws it from the round's key and the
  contributors, and `Fix` stores the sum with it. So one set has one noise, whatever crashes in between, and the stored
  sum is the one that is sent; a second set, which would show a difference, is refused as above.

Shares are secret and stay outside: an event carries the fingerprint of a share, not the share.

More than 400 lines: one state machine, whose rules are read together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, assert_never

from labeler.errors import (
    DuplicateAgent,
    LabelerError,
    LateShare,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    TooLarge,
    TryAgain,
    Unavailable,
    WrongDigest,
)
from labeler.messages.bodies import OpenRound, SumRequest

MAX_OPEN_ROUNDS = 10_000
MAX_OPEN_BYTES = 64 * 2**30
"""Most bytes that single shares of the open rounds could take if every agent sent the largest."""

SUM_KEPT_S: Final = 7 * 86_400.0
"""How long a sum is kept after its round expired, for a coordinator that lost it in transit."""

Stage = Literal["unknown", "open", "fixed", "forgotten"]


def _nothing() -> Mapping[str, bytes]:
    return MappingProxyType({})


@dataclass(frozen=True, repr=False)
class TallierRound:
    """One round at one tallier.

    Attributes:
        stage: durable once the effects are.
        opening: as the coordinator described it; None if the round is unknown.
        sharing_ids: of the agents whose share is held; after the sum, of those summed.
        fingerprints: of every share ever accepted.
        excluded: agents that sent two different ones.
        contributors: the summed agents, once the sum was asked for.
    """

    round_digest: str
    stage: Stage = "unknown"
    opening: OpenRound | None = None
    sharing_ids: Mapping[str, bytes] = field(default_factory=_nothing)
    fingerprints: Mapping[str, bytes] = field(default_factory=_nothing)
    excluded: frozenset[str] = frozenset()
    contributors: frozenset[str] | None = None

    @property
    def expires_at(self) -> float:
        """Return the unix time in seconds after which nothing of it is kept; infinite if nothing is stored."""
        if self.opening is None or self.stage not in ("open", "fixed"):
            return float("inf")
        return self.opening.expires_at + (SUM_KEPT_S if self.stage == "fixed" else 0.0)

    def __repr__(self) -> str:
        return f"TallierRound({self.round_digest[:12]!r}, {self.stage!r}, agents={len(self.fingerprints)})"


@dataclass(frozen=True)
class TallierSite:
    """The rules of a tallier's own site, and its free room.

    Attributes:
        agents: id and verify key of the agents it knows; None if it knows none by name.
        open_rounds, open_bytes: open here already.
        max_open_rounds, max_open_bytes: the limits.
    """

    agents: Mapping[str, str] | None = None
    open_rounds: int = 0
    open_bytes: int = 0
    max_open_rounds: int = MAX_OPEN_ROUNDS
    max_open_bytes: int = MAX_OPEN_BYTES


# Events.


@dataclass(frozen=True)
class OpeningCame:
    """The coordinator opens a round."""

    opening: OpenRound
    site: TallierSite


@dataclass(frozen=True)
class Came:
    """One share, as far as the machine looks at it.

    Attributes:
        agent: its sender, by a checked signature.
        sharing_id, fingerprint: of the share.
        misfit: why it cannot be one of this round; empty if it can.
    """

    agent: str
    sharing_id: bytes
    fingerprint: bytes
    misfit: str = ""


@dataclass(frozen=True)
class SharesCame:
    """Shares of one round, in the order in which they came."""

    shares: tuple[Came, ...]


@dataclass(frozen=True)
class SumAsked:
    """The charge is posted; the coordinator asks for the sum of these agents."""

    request: SumRequest
    site: TallierSite


@dataclass(frozen=True)
class Added:
    """The shares are added up; the sum is not stored yet."""


@dataclass(frozen=True)
class RoundExpired:
    """The time may have come after which nothing is kept."""


TallierEvent = OpeningCame | SharesCame | SumAsked | Added | RoundExpired


# Effects.


@dataclass(frozen=True)
class Keep:
    """Store the round."""

    opening: OpenRound


@dataclass(frozen=True)
class Hold:
    """Store an agent's share, the one at this position of the event."""

    agent: str
    place: int


@dataclass(frozen=True)
class Exclude:
    """Take no share of this agent any more, and drop the one that is held."""

    agent: str


@dataclass(frozen=True)
class Add:
    """Add up the held shares of these agents, with this tallier's noise if the round says so."""

    contributors: frozenset[str]


@dataclass(frozen=True)
class Fix:
    """Store the summed agents and the sum permanently, and drop the single shares."""

    contributors: frozenset[str]


@dataclass(frozen=True)
class SendSum:
    """Send the stored sum."""


@dataclass(frozen=True)
class FindWinners:
    """Find the winners of the stored sum with the two other talliers; the sum stays here."""


@dataclass(frozen=True)
class Report:
    """Report the agents whose shares are held."""


@dataclass(frozen=True)
class Forget:
    """Drop sum and shares; the set of summed agents stays."""


@dataclass(frozen=True)
class RefuseEvent:
    """Do nothing, for this reason."""

    error: LabelerError


@dataclass(frozen=True)
class DeclineRequest:
    """Tell the coordinator that a request is not fulfilled, so that it does not wait in vain.

    Attributes:
        is_final: it never will be; False if asking again may help.
    """

    error: LabelerError
    is_final: bool = True


TallierEffect = (
    Keep | Hold | Exclude | Add | Fix | SendSum | FindWinners | Report | Forget | RefuseEvent | DeclineRequest
)
_Step = tuple[TallierRound, tuple[TallierEffect, ...]]


def step(state: TallierRound, event: TallierEvent, now: float) -> _Step:
    """Return the next state of a round, and its effects; see the module.

    Args:
        event: events may come in any order.
        now: unix time in seconds.
    """
    match event:
        case OpeningCame(opening, site):
            try:
                return _opened(state, opening, site, now)
            except LabelerError as error:
                if state.stage in ("open", "fixed"):
                    return state, (RefuseEvent(error), Report())
                return state, (DeclineRequest(error, is_final=not isinstance(error, TryAgain)),)
        case SharesCame(shares):
            return _came(state, shares)
        case SumAsked(request, site):
            try:
                return _sum_asked(state, request, site)
            except LabelerError as error:
                # The held shares are reported too, so that a mistaken coordinator finds out.
                return state, (RefuseEvent(error), Report())
        case Added():
            if state.stage != "open" or state.contributors is None:
                return state, ()
            ids = {agent: state.sharing_ids[agent] for agent in sorted(state.contributors)}
            fixed = replace(state, stage="fixed", sharing_ids=MappingProxyType(ids))
            return fixed, (Fix(state.contributors), _told(fixed))
        case RoundExpired():
            if now <= state.expires_at:
                return state, ()
            over = TallierRound(state.round_digest, "forgotten", state.opening, contributors=state.contributors)
            return over, (Forget(),)
        case other:
            assert_never(other)


def most_bytes(opening: OpenRound) -> int:
    """Return the largest possible size of a round's shares."""
    round = opening.round
    # If rows are checked, ballots with a column for votes not cast are sent in addition to the noise.
    columns = 2 * round.num_classes + 1 if round.terms is not None and round.terms.row_total else round.num_classes
    return 8 * round.num_queries * columns * len(opening.participants)


def _told(state: TallierRound) -> TallierEffect:
    is_histogram = state.opening is None or state.opening.round.terms is None
    return SendSum() if is_histogram else FindWinners()


def _opened(state: TallierRound, opening: OpenRound, site: TallierSite, now: float) -> _Step:
    if opening.round.digest != state.round_digest:
        raise WrongDigest("an open-round names another round than it holds")
    if opening.expires_at < now:
        raise ProtocolViolation("the round has expired")
    _check_agents(opening, site)
    if state.stage == "forgotten":
        raise PrivacyRefusal("the round was given up and forgotten; it is not opened again. Submit a new job")
    if state.opening is None:
        _check_room(opening, site)
        return replace(state, stage="open", opening=opening), (Keep(opening), Report())
    if state.opening != opening:
        raise WrongDigest(
            f"round {state.round_digest[:12]!r} was opened before with other participants, number of the tallier or "
            "deadline; a round never changes. Submit a new job"
        )
    return state, (Report(),)


def _check_agents(opening: OpenRound, site: TallierSite) -> None:
    """Refuse agents unknown to this tallier's own site: only noise of known agents can be relied on."""
    if site.agents is None:
        return
    for agent, key in sorted(opening.participants.items()):
        if site.agents.get(agent) != key:
            raise PrivacyRefusal(
                f"[agents] of tallier.toml names {len(site.agents)} agents and their keys, and the round names "
                f"{agent!r} with the key {key[:16]}, which is none of them; an agent unknown here may add "
                "no noise. Compare its key over the phone, add it, and restart this tallier"
            )


def _check_room(opening: OpenRound, site: TallierSite) -> None:
    """Decline a round that exceeds the site's room, so that no coordinator can fill its disk; it may ask later."""
    if site.open_rounds >= site.max_open_rounds:
        raise Unavailable(
            f"{site.open_rounds} rounds are open at this tallier and were not summed, at most {site.max_open_rounds} "
            "may be; the coordinator asks again once some were summed or have expired"
        )
    wanted = most_bytes(opening)
    if wanted > site.max_open_bytes:
        raise TooLarge(
            f"the shares of a round could come to {wanted} bytes, at most {site.max_open_bytes} are kept at this "
            "tallier; ask fewer queries at a time"
        )
    if site.open_bytes + wanted > site.max_open_bytes:
        raise Unavailable(
            f"the shares of a round could come to {wanted} bytes, and those of the rounds that are open here leave "
            f"no room for them, at most {site.max_open_bytes} are kept at this tallier; the coordinator asks again "
            "once some were summed or have expired"
        )


def _came(state: TallierRound, shares: Sequence[Came]) -> _Step:
    if state.opening is None or state.stage not in ("open", "fixed"):
        return state, (RefuseEvent(WrongDigest("this tallier knows no such round, or it has expired")),)
    ids, prints, excluded = dict(state.sharing_ids), dict(state.fingerprints), set(state.excluded)
    is_open = state.stage == "open" and state.contributors is None
    effects: list[TallierEffect] = []
    for place, share in enumerate(shares):
        agent, known = share.agent, prints.get(share.agent)
        if agent not in state.opening.participants:
            effects.append(RefuseEvent(ProtocolViolation(f"agent {agent!r} takes no part in this round")))
        elif share.misfit:
            effects.append(RefuseEvent(ProtocolViolation(f"a share of agent {agent!r} {share.misfit}")))
        elif agent in excluded or (known is not None and known != share.fingerprint):
            if is_open:
                excluded.add(agent)
                ids.pop(agent, None)
                effects.append(Exclude(agent))
            effects.append(RefuseEvent(_sent_two(state.opening, agent)))
        elif known is not None:
            continue
        elif not is_open:
            effects.append(
                RefuseEvent(
                    LateShare(
                        f"the share of agent {agent!r} came after the sum of this round was made; it can take part in "
                        "the next"
                    )
                )
            )
        else:
            ids[agent], prints[agent] = share.sharing_id, share.fingerprint
            effects.append(Hold(agent, place))
    after = replace(
        state,
        sharing_ids=MappingProxyType(ids),
        fingerprints=MappingProxyType(prints),
        excluded=frozenset(excluded),
    )
    return after, (*effects, Report())


def _sent_two(opening: OpenRound, agent: str) -> DuplicateAgent:
    return DuplicateAgent(
        f"agent {agent!r} sent tallier {opening.tallier} two different shares in one round and is excluded from it, "
        "unless it was summed already; a retry must send the stored shares again, not new ones"
    )


def _sum_asked(state: TallierRound, request: SumRequest, site: TallierSite) -> _Step:
    opening, wanted = state.opening, request.contributors
    if opening is None or state.stage not in ("open", "fixed"):
        # A sum is asked for once every tallier has reported that it holds the shares, so it did not come too early.
        return state, (DeclineRequest(_gone(state)),)
    try:
        _check_agents(opening, site)
    except PrivacyRefusal as unnamed:
        # It was paid for, and an agent that was removed from the site's list may be put back.
        return state, (DeclineRequest(unnamed, is_final=False), Report())
    if state.contributors is not None:
        if wanted != state.contributors:
            error = PrivacyRefusal(
                f"tallier {opening.tallier} has summed this round over another set of agents "
                f"({len(state.contributors)}, now asked for {len(wanted)}); two sums of one round would differ by "
                "single ballots, so the second is refused for ever"
            )
            return state, (DeclineRequest(error), Report()) if state.stage == "fixed" else (DeclineRequest(error),)
        return state, (_told(state),) if state.stage == "fixed" else ()
    _check_held(opening, wanted, state.sharing_ids)
    return replace(state, contributors=wanted), (Add(wanted),)


def _gone(state: TallierRound) -> LabelerError:
    if state.stage == "unknown":
        return ProtocolViolation("this tallier never opened the round, or its journal is an older copy")
    return ProtocolViolation(
        "the round's time was over before it was summed, and this tallier has erased its shares, so nothing of it can "
        "be opened any more. What was charged stands; submit the job again"
    )


def _check_held(opening: OpenRound, wanted: Collection[str], held: Mapping[str, bytes]) -> None:
    if len(wanted) < opening.round.quorum:
        raise QuorumNotReached(
            f"{len(wanted)} agents contributed, the quorum is {opening.round.quorum}; nothing is opened, because the "
            "noise of fewer agents does not add up to what was promised. Wait for more agents, or start a new task."
        )
    missing = set(wanted) - held.keys()
    if missing:
        raise ProtocolViolation(
            f"tallier {opening.tallier} holds no share of {len(missing)} of the {len(wanted)} agents to sum, among "
            f"them {min(missing)!r}; agree on the contributors again"
        )
