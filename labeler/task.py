"""A task: what all parties agree on before anybody answers.

The task fixes everything the privacy price depends on. It is immutable, and its digest (SHA-256 of its canonical JSON)
is in every message. An agent answers only the task it has checked, and a tallier adds only ballots of the same task.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from labeler.errors import InvalidTask, UnsafeGrid
from labeler.methods import DEFAULT_RELEASE, METHODS, Method, MethodName, ReleaseKind
from labeler.methods.sensitivity import most_votes_in_a_sum
from labeler.noise import (
    DEFAULT_SHARE_SIGMA_GRID,
    MAX_COMPARISON_BITS,
    MAX_GRID_SUM,
    MAX_SHARE_SIGMA_GRID,
    MIN_SHARE_SIGMA_GRID,
    NOISE_TAIL_CUT,
    TALLIERS,
    NoiseBy,
    noise_reach,
    vector_scale,
)
from labeler.setting import Level as Level
from labeler.setting import Life as Life
from labeler.setting import Sampled as Sampled
from labeler.setting import StatedLevel as StatedLevel
from labeler.setting import Training as Training
from labeler.settings import PlainNumbers, one_spelling
from labeler.settings import describe_validation as describe_validation

if TYPE_CHECKING:
    from labeler.sharing import WinnerTerms

LEAST_SIGMA_VOTES = 1e-6
"""Less noise than this hides nothing, and its grid would exceed the range of ordinary numbers."""

NEGATIVES_EVERY = 5
"""One query in five is a public negative example of the certainty scores, as in the paper of FedAUXfdp."""

SOFT_VOTE_SCALE = 2**24
"""Grid units of one soft vote (aux-distill): no noise lies on this grid, so it only needs to be fine."""

MAX_WINNER_WIDTH: int = 2**MAX_COMPARISON_BITS - 2
"""Largest difference of two noisy sums of a winner task, in grid units, that fits into a field of 64 bits."""

MOST_CLASSES: Final = 32_000
"""Most classes of a task, and most attributes of a record: labels are signed 16-bit integers."""

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("only printable characters: no line break, no tab and no other control character")
    return text


Printable = Annotated[str, AfterValidator(_check_printable)]
"""A text that people read in terminals and logs, where a control character could rewrite its surroundings."""


def can_name_a_class(name: str) -> bool:
    """Return whether a task can ask about a class of this name: printable, without spaces around it."""
    return bool(name) and name.isprintable() and name == name.strip()


class Task(PlainNumbers):
    """One labeling task.

    Attributes:
        name: for people; part of the digest.
        classes: public list of class names, in label order. Never read from private data.
        method: how an agent votes (see labeler.methods). A task names it; a request need not (labeler.solving).
        k: neighbors that vote: records per query (knn), or queries per record (reverse-knn). Public,
            the same for every agent; 1 for every other method.
        sigma_votes: standard deviation, in votes, of the noise on one coordinate of the sum, without noise that
            somebody can subtract. This much remains if `colluding_agents` pool what they know and `max_dropouts` are
            gone. For methods that answer with real numbers the unit is the largest change by one record
            (labeler.methods). Then sigma is the noise multiplier.
        delta: the failure probability of the guarantee.
        max_queries: most queries asked in this task; the price is for all of them. For blind-average it is the
            number of rows of the model's weights: one per entry of a feature, and one for the intercept. For federated
            it is that number of rows for each of the steps.
        release: what is opened: the noisy histogram or its winner.
        agents: N, number of participating agents.
        colluding_agents: how many of them may pool what they know without weakening the guarantee.
        max_dropouts: how many may fail to answer before nothing is opened.
        max_agent_records: public bound on the records one agent votes with. Only reverse-knn needs it,
            and only for a finite agent-level price. An agent that holds more records votes with the first ones.
        ballot_radius: R, in votes: each agent projects its whole ballot, centered, onto a ball of this radius
            (labeler.methods.reverse_knn). Only for reverse-knn, and only for a finite agent-level price, which needs
            far less noise than with `max_agent_records`. Public.
        records_per_person: m, the most records of one person with which an agent answers: those with the m smallest
            record ids, which are random. If given, a price is also stated for a person, and an agent can answer only
            if its shard knows the person of each record.
        attributes_per_record: tau. If given, classes are attributes, and a record may have any number of them. It
            votes for the first tau that it has, in the order of `classes` (labeler.methods.knn.attribute_ballots).
            Public; None if each record is of exactly one class.
        lifetime_budget: reverse-knn only: each record votes within a budget for its whole life, at queries that are
            near enough. That budget is the price, however many such tasks there are (labeler.accounting.lifetime).
        training: how an agent fits the model that it answers with; for blind-average and aux-distill, whose price
            depends on it.
        abstain_below: winner only: a query whose best noisy sum is below this many votes gets the answer -1.
        talliers: how many parties hold one secret share of each ballot; the winner needs 3.
        dishonest_talliers: how many of the three talliers may be dishonest, if they add the noise and the agents add
            none (labeler.noise). None: the agents add it. If given, `colluding_agents` changes nothing.
        grid_scale: grid units per vote (S). Chosen from sigma when absent.
        backbone_fingerprint: the backbone that made every feature, private and public.
        nonce: makes two otherwise equal tasks different, so that each draws its own noise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, hide_input_in_errors=True)

    name: Annotated[Printable, Field(min_length=1, max_length=200)]
    classes: Annotated[tuple[Printable, ...], Field(min_length=2, max_length=MOST_CLASSES)]
    method: MethodName
    k: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    sigma_votes: Sigma
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    max_queries: Annotated[int, Field(ge=1, le=100_000_000)]
    release: ReleaseKind = DEFAULT_RELEASE
    agents: Annotated[int, Field(ge=1, le=1_000_000)]
    colluding_agents: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_dropouts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_agent_records: Annotated[int, Field(ge=1, le=2**40)] | None = None
    ballot_radius: Annotated[int, Field(ge=1, le=2**40)] | None = None
    records_per_person: Annotated[int, Field(ge=1, le=2**40)] | None = None
    attributes_per_record: Annotated[int, Field(ge=1, le=MOST_CLASSES)] | None = None
    lifetime_budget: Life | None = None
    training: Training | None = None
    abstain_below: Annotated[int, Field(ge=0, le=2**40)] | None = None
    talliers: Literal[2, 3] = 3
    dishonest_talliers: Literal[1, 2] | None = None
    grid_scale: Annotated[int, Field(ge=1, le=2**40)] | None = None
    backbone_fingerprint: Printable = ""
    nonce: Printable = ""

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.sigma_votes < LEAST_SIGMA_VOTES:
            raise ValueError(f"sigma_votes must be at least {LEAST_SIGMA_VOTES:g} votes, found {self.sigma_votes:g}")
        if len(set(map(one_spelling, self.classes))) != len(self.classes):
            raise ValueError("classes must be different from each other")
        if any(not name for name in self.classes):
            raise ValueError("a class name must not be empty")
        if not self.traits.has_k and self.k != 1:
            raise ValueError(f"k must be 1 for method {self.method}, which has no neighbours; found {self.k}")
        if self.release not in self.traits.releases:
            raise ValueError(
                f"release must be {' or '.join(self.traits.releases)} for method {self.method}: the largest of a row "
                "of its sums is not what was asked for"
            )
        if ("training" in self.traits.takes) != (self.training is not None):
            raise ValueError(
                f"training must be given for method {self.method}: it says how agents train (docs/task-training.md)"
                if self.training is None
                else f"training must not be given for method {self.method}; take it out"
            )
        if self.traits.learns_from_queries and self.training and self.training.dimension >= self.num_negatives:
            raise ValueError(
                f"training.dimension must be below the {self.num_negatives} public negatives, which are every "
                f"{NEGATIVES_EVERY}th query; found {self.training.dimension}"
            )
        self._check_sampled()
        if self.training is not None and self.training.axes is not None and "training.axes" not in self.traits.takes:
            raise ValueError(
                f"training.axes only means something for method {_methods_that_take('training.axes')}, "
                f"found {self.method}"
            )
        if self.grid_scale is not None and not self.traits.counts:
            raise ValueError(f"grid_scale follows from the other fields for method {self.method}; leave it out")
        for name in ("max_agent_records", "ballot_radius"):
            if getattr(self, name) is not None and name not in self.traits.takes:
                raise ValueError(f"{name} only means something for method {_methods_that_take(name)}")
        if self.lifetime_budget is not None:
            self._check_life()
        if self.attributes_per_record is not None:
            self._check_attributes()
        if self.release == "winner" and self.talliers != 3:
            raise ValueError(
                "talliers must be 3 for release winner: of two, one dishonest tallier is no minority, so that nothing "
                "they compute together stays hidden from it. Use 3 talliers, or release the histogram"
            )
        if self.abstain_below is not None and self.release != "winner":
            raise ValueError(
                "abstain_below only means something for release winner: whoever has the histogram sees its best "
                "noisy count, and can leave a query unanswered without asking for it here"
            )
        self._check_who_adds_noise()
        return self

    def _check_who_adds_noise(self) -> None:
        if self.dishonest_talliers is not None:
            if self.talliers != TALLIERS:
                raise ValueError(
                    f"talliers must be {TALLIERS} where they add the noise (dishonest_talliers): of two, of which one "
                    "may be dishonest, the other would add all of it. Use 3 talliers, or leave dishonest_talliers out"
                )
            if self.traits.has_local_noise:
                raise ValueError(
                    f"dishonest_talliers must not be given for method {self.method}: its noise is in the model from "
                    "which each agent answers, before there is anything to sum, and no noise on the sum stands in for "
                    "it; leave it out, so that the agents add it"
                )
            if self.agents - self.max_dropouts < 1 or self.colluding_agents > self.agents:
                raise ValueError(
                    f"{self.max_dropouts} dropouts and {self.colluding_agents} colluding agents of {self.agents}: at "
                    "least one agent must contribute, and no more can collude than there are"
                )
            return
        if self.agents - self.colluding_agents - self.max_dropouts < 1:
            raise ValueError(
                f"too few agents for the collusion stated: of {self.agents}, {self.colluding_agents} may collude and "
                f"{self.max_dropouts} may drop out, which can leave no agent whose noise they cannot subtract; "
                f"add agents, or lower colluding_agents or max_dropouts: together at most {self.agents - 1}"
            )

    def _check_attributes(self) -> None:
        if "attributes_per_record" not in self.traits.takes:
            raise ValueError(
                f"attributes_per_record only means something for method {_methods_that_take('attributes_per_record')}: "
                f"of {self.method} nobody has stated what a record with several attributes changes, and how its sums "
                "are read"
            )
        if self.release != "histogram":
            raise ValueError(
                "release must be histogram with attributes_per_record: a winner is the one class with most votes, and "
                "of attributes any number may hold at once"
            )

    def _check_sampled(self) -> None:
        sampled = self.sampled
        if (sampled is not None) != ("training.sampled" in self.traits.takes):
            raise ValueError(
                f"training.sampled must {'' if sampled is None else 'not '}be given for method {self.method}: it says "
                "how a model is trained in steps over secret samples"
            )
        if sampled is None:
            return
        if self.max_queries % self.steps or self.rows < 2:
            raise ValueError(
                f"max_queries must be as many rows for each of the {self.steps} steps (training.iterations), at least "
                f"2; found {self.max_queries}"
            )
        if self.records_per_person is not None:
            raise ValueError(
                "records_per_person goes with no sampled training: under a cap one record replaces another, and the "
                "price is proved for a record that comes or goes"
            )

    def _check_life(self) -> None:
        if "lifetime_budget" not in self.traits.takes:
            raise ValueError(
                f"lifetime_budget only means something for method {_methods_that_take('lifetime_budget')}: of "
                f"{self.method} nobody has proved what a record costs that has spent its budget and falls silent"
            )
        if self.a_record_may_be_replaced:
            raise ValueError(
                "lifetime_budget goes with neither max_agent_records nor records_per_person: under a cap a record that "
                "leaves lets another in, which has a budget of its own to spend"
            )
        budget = self.lifetime_budget
        asked = () if budget is None or budget.asked_classes is None else budget.asked_classes
        if len(set(asked)) != len(asked) or not set(asked) <= set(self.classes):
            raise ValueError("lifetime_budget.asked_classes must be different classes of the task")
        if self.ballot_radius is not None:
            raise ValueError(
                "lifetime_budget does not go with ballot_radius: drawn onto a ball, every count of an agent moves with "
                "each record, and a record pays for its own votes alone"
            )

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_asked(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A task without such a field is written, and hashed, as it was before the field existed.
        fields: dict[str, Any] = dump(self)
        for name in (
            "records_per_person", "ballot_radius", "attributes_per_record", "lifetime_budget", "dishonest_talliers",
        ):  # fmt: skip
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Task:  # noqa: ARG002  # pydantic's signature; everything here is immutable
        """Return a validated copy: pydantic's own would keep the cached grid and digest of the original task."""
        return Task.model_validate(self.model_dump() | dict(update or {}))

    @property
    def a_record_may_be_replaced(self) -> bool:
        """Return whether records are capped. Under a cap, a record that leaves may let in one that never voted."""
        return self.max_agent_records is not None or self.records_per_person is not None

    @property
    def traits(self) -> Method:
        """Return the public properties of the task's method."""
        return METHODS[self.method]

    @property
    def num_negatives(self) -> int:
        """Return how many of the task's queries are public negative examples (aux-distill)."""
        return -(-self.max_queries // NEGATIVES_EVERY)

    @property
    def sampled(self) -> Sampled | None:
        """Return the terms of a model that is trained in steps over secret samples; None for other tasks."""
        return None if self.training is None else self.training.sampled

    @property
    def steps(self) -> int:
        """Return the number of rounds of a sampled training, each based on the earlier ones; 1 for other tasks."""
        return 1 if self.training is None or self.sampled is None else self.training.iterations

    @property
    def rows(self) -> int:
        """Return the number of queries in each of the `steps` rounds."""
        return self.max_queries // self.steps

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def votes_of_a_record(self) -> int:
        """Return t, the most classes for which one record votes at a query: one, or `attributes_per_record`."""
        return 1 if self.attributes_per_record is None else min(self.attributes_per_record, self.num_classes)

    @property
    def quorum(self) -> int:
        """Return the fewest contributing agents for which anything is opened."""
        return self.agents - self.max_dropouts

    @property
    def noise_contributors(self) -> int:
        """Return h = N - colluding_agents - max_dropouts: contributors whose noise the adversary certainly does not
        know.

        It is 1 if each agent's own noise is enough for its price, since no other party knows any of it. If the talliers
        add the noise, it is the number of honest talliers.
        """
        if self.traits.has_local_noise:
            return 1
        if self.dishonest_talliers is not None:
            return self.talliers - self.dishonest_talliers
        return self.agents - self.colluding_agents - self.max_dropouts

    @property
    def noise_by(self) -> NoiseBy:
        """Return "agents" or "talliers", whichever add the noise."""
        return "agents" if self.dishonest_talliers is None else "talliers"

    @property
    def noise_parties(self) -> int:
        """Return the number of noise shares in a sum to which every agent contributed."""
        return self.agents if self.noise_by == "agents" else self.talliers

    @property
    def tallier_sigma_grid(self) -> float | None:
        """Return the parameter of each tallier's noise on each number, in grid units; None if agents add it."""
        return None if self.noise_by == "agents" else self.share_sigma_grid

    @cached_property
    def scale(self) -> int:
        """Return S, grid units per vote.

        Raises:
            UnsafeGrid: a noise share would have a standard deviation below 100 grid units, or a sum
                could leave the range in which addition modulo 2^64 is ordinary addition.
        """
        per_share = self.sigma_votes / math.sqrt(self.noise_contributors)
        if self.traits.has_local_noise:
            return SOFT_VOTE_SCALE
        if not self.traits.counts:
            return vector_scale(dimension=self.rows * self.num_classes, sensitivity=1.0, share_sigma=per_share)
        scale = self.grid_scale or self._default_scale(per_share)
        if per_share * scale < MIN_SHARE_SIGMA_GRID:
            raise UnsafeGrid(
                f"grid_scale {scale} gives a noise share a standard deviation of {per_share * scale:.3g} grid units; "
                f"the guarantee needs at least {MIN_SHARE_SIGMA_GRID:g}. "
                f"Leave grid_scale out, or set it to {math.ceil(MIN_SHARE_SIGMA_GRID / per_share)} or more."
            )
        if per_share * scale > MAX_SHARE_SIGMA_GRID:
            if self.grid_scale is None:
                raise UnsafeGrid(
                    f"the noise is too large: sigma {self.sigma_votes:g} gives a noise share a standard deviation of "
                    f"{per_share * scale:.3g} grid units on the coarsest grid there is, and the exact sampler reaches "
                    f"{MAX_SHARE_SIGMA_GRID:g}. Take less noise, or a larger epsilon."
                )
            raise UnsafeGrid(
                f"with grid_scale {scale} a noise share has a standard deviation of {per_share * scale:.3g} grid "
                f"units; the exact sampler reaches {MAX_SHARE_SIGMA_GRID:g}. Leave grid_scale out, or lower it."
            )
        if self.release == "winner":
            self._check_winner_fits(scale, per_share)
            return scale
        largest = self.agents * most_votes_in_a_sum(self) * scale + self.noise_parties * noise_reach(per_share * scale)
        if largest >= MAX_GRID_SUM:
            raise UnsafeGrid(
                f"with grid_scale {scale} a sum could reach {largest:.3g} grid units; the limit is {MAX_GRID_SUM:.3g}. "
                "Use a smaller grid_scale, sigma_votes, k, ballot_radius or max_agent_records."
            )
        return scale

    def _default_scale(self, per_share: float) -> int:
        """Return the scale that gives a noise share 1600 grid units, or the largest at which a winner's sums fit."""
        scale = max(1, math.ceil(DEFAULT_SHARE_SIGMA_GRID / per_share))
        if self.ballot_radius is not None:
            # Rounding onto the ball may move every number of a ballot. The grid is so fine that this hardly counts.
            entries, moved = self.max_queries * self.num_classes, math.sqrt(min(self.k, self.max_queries))
            scale = vector_scale(dimension=entries, sensitivity=moved, share_sigma=per_share)
        if self.release == "histogram":
            return scale
        # Noise shares in the room of one agent: its own, or its part of the talliers' shares, rounded up.
        shares = 1 if self.noise_by == "agents" else -(-self.talliers // self.agents)
        room = MAX_WINNER_WIDTH // self.agents
        if self.traits.is_reverse:
            # Half of the range is for votes. So an agent's cell is clipped at no less than 25 sigma of a noise share.
            votes = self._signs
            largest = min(
                _largest_scale(room // 2, 0, per_share, shares), _largest_scale(room, votes, per_share, shares)
            )
        else:
            largest = _largest_scale(room, self.k, per_share, shares)
        least = math.ceil(MIN_SHARE_SIGMA_GRID / per_share)
        # Division and multiplication round differently: the product must reach the minimum too.
        if per_share * least < MIN_SHARE_SIGMA_GRID:
            least += 1
        return max(min(scale, largest), least)

    def _check_winner_fits(self, scale: int, per_share: float) -> None:
        # Counts of reverse-knn are clipped to what fits, but never below one vote.
        is_clipped = self.traits.is_reverse
        votes = self._signs if is_clipped else self.k
        width = self.agents * votes * scale + self.noise_parties * 2 * noise_reach(per_share * scale)
        if width > MAX_WINNER_WIDTH:
            # The larger the noise, the fewer grid units a vote takes, down to the one that it must have.
            changes = [f"{'smaller' if scale == 1 else 'larger'} sigma_votes", "fewer agents"]
            floor, reach = "", noise_reach(MIN_SHARE_SIGMA_GRID)
            if self.noise_by == "agents" and self.agents > MAX_WINNER_WIDTH // (2 * reach):
                # No sigma suffices: a share is at least this wide, and the sum of all shares must fit the range.
                floor = (
                    f" No more than {MAX_WINNER_WIDTH // (2 * reach)} agents can add the noise of winners, since each "
                    f"one's share reaches {reach} grid units to either side at the least that the proof needs."
                )
                changes = ["dishonest_talliers = 1 (three talliers add the noise, and not each agent)", "fewer agents"]
            changes += ([] if is_clipped else ["a smaller k"]) + (["no grid_scale"] if self.grid_scale else [])
            raise UnsafeGrid(
                f"with grid_scale {scale}, noisy sums over {self.agents} agents of up to {votes} votes each"
                + (" (no count can be clipped lower)" if is_clipped else "")
                + f" lie up to {width} grid units apart; the winner can be computed securely up to {MAX_WINNER_WIDTH}."
                + f"{floor} Use {', '.join(changes)}, or release the histogram."
            )

    @property
    def noise_reach(self) -> int:
        """Return the largest magnitude of one party's noise on one count, in grid units."""
        return noise_reach(self.share_sigma_grid)

    @property
    def _signs(self) -> int:
        """Return the number of sides of zero on which an agent's votes lie: two if ballots are centered, else one."""
        return 1 if self.ballot_radius is None else 2

    @cached_property
    def vote_clip(self) -> int | None:
        """Return the limit to which an agent clips each count of its ballots, in votes; None if none is needed.

        With reverse-knn an agent may cast any number of votes for one class at one query, and a sum of such
        counts fits no field. So for the winner each count is cut at the largest number with which every sum
        fits. It follows from the task alone and is the same for every agent. Cutting costs no privacy
        (labeler.methods.reverse_knn). It costs accuracy if it binds: if one agent has more votes than that for
        two classes, both get equally many from it.
        """
        if self.release != "winner" or not self.traits.is_reverse:
            return None
        # Noise shares in the room of one agent, as in `_default_scale`.
        shares = 1 if self.noise_by == "agents" else -(-self.talliers // self.agents)
        fits = (MAX_WINNER_WIDTH // self.agents - shares * 2 * self.noise_reach) // (self._signs * self.scale)
        return min([fits, *(cap for cap in (self.max_agent_records, self.ballot_radius) if cap is not None)])

    @cached_property
    def winner_terms(self) -> WinnerTerms | None:
        """Return the terms that talliers need to find the winners; None if the histogram is released.

        The range holds for a sum over any of the N agents, so dropouts do not matter. Each agent has 0 to M votes in a
        cell (-M to M on a ball), where M is `vote_clip` or k. The noise of each party stays within its reach.
        """
        if self.release != "winner":
            return None
        # Imported only here: a task's price needs no numpy.
        from labeler.sharing import WinnerTerms

        most_votes = self.vote_clip or self.k
        return WinnerTerms(
            scale=self.scale,
            lowest=-self.agents * (self._signs - 1) * most_votes * self.scale - self.noise_parties * self.noise_reach,
            highest=self.agents * most_votes * self.scale + self.noise_parties * self.noise_reach,
            row_total=None if self.traits.row_total is None else self.traits.row_total(self),
            threshold=None if self.abstain_below is None else self.abstain_below * self.scale,
        )

    @property
    def share_sigma_grid(self) -> float:
        """Return the standard deviation of one party's noise share, in grid units: S * sigma / sqrt(h)."""
        return self.scale * self.sigma_votes / math.sqrt(self.noise_contributors)

    @property
    def total_sigma_votes(self) -> float:
        """Return the standard deviation of the actual noise in a sum of all agents: sigma * sqrt(N / h).

        It is sigma if each agent's own noise is in its answer, and sigma * sqrt(3 / h) if the talliers add it.
        """
        return self.sum_sigma_votes(self.agents)

    def sum_sigma_votes(self, contributors: int) -> float:
        """Return the standard deviation of the actual noise in a sum over `contributors` agents."""
        if self.traits.has_local_noise:
            return self.sigma_votes
        parties = contributors if self.noise_by == "agents" else self.talliers
        return self.sigma_votes * math.sqrt(parties / self.noise_contributors)

    @cached_property
    def kind(self) -> str:
        """Return every field but name and nonce, as JSON. Tasks of one kind cost the same."""
        return self.model_dump_json(exclude={"name", "nonce"})

    @cached_property
    def digest(self) -> str:
        """Return SHA-256 over the canonical JSON of every field, in hexadecimal.

        Newer fields are included only if they are given: tasks without them keep their digest.
        """
        fields = self.model_dump(mode="json") | {"scale": self.scale}
        for later in ("abstain_below", "training"):
            if fields[later] is None:
                del fields[later]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(b"labeler-task/1\n" + canonical.encode()).hexdigest()


def _methods_that_take(field: str) -> str:
    return " or ".join(name for name, method in METHODS.items() if field in method.takes)


def _largest_scale(room: int, votes: int, per_share: float, shares: int) -> int:
    """Return the largest scale, at least 1, at which the votes and the noise's reach to both sides fit into a room.

    Args:
        room: grid units.
        votes: of one agent in a cell.
        per_share: standard deviation of a noise share, votes.
        shares: number of noise shares in the room.
    """
    # Start above the exact quotient, and go down the few steps by which rounding may change it.
    scale = math.floor(room / (votes + shares * 2 * NOISE_TAIL_CUT * per_share)) + 1
    while scale > 1 and votes * scale + shares * 2 * noise_reach(per_share * scale) > room:
        scale -= 1
    return scale


def parse_task(fields: object) -> Task:
    """Validate a mapping (from TOML or JSON) into a task.

    Raises:
        InvalidTask: one sentence per field that is unknown, missing or out of bounds.
        UnsafeGrid: see Task.scale.
    """
    try:
        task = Task.model_validate(fields)
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "task", model=Task)) from None
    _ = task.scale
    return task
