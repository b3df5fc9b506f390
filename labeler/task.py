"""A task: what all parties agree on before anybody answers.

The task fixes everything the privacy price depends on. It is immutable, and its digest (SHA-256 of
its canonical JSON) travels with every message: an agent answers only the task it has checked, and
a tallier adds only ballots of the same task.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from labeler.errors import InvalidTask, UnsafeGrid

Method = Literal["knn", "reverse-knn", "one-hot"]
ReleaseKind = Literal["histogram", "winner"]
Level = Literal["instance", "agent"]

MIN_SHARE_SIGMA_GRID = 100.0
"""Least standard deviation of one agent's noise share, in grid units (PRIVACY section 2)."""

DEFAULT_SHARE_SIGMA_GRID = 1600.0
"""What a task without `grid_scale` aims at: fine enough that epsilon is the continuous one to five digits."""

MAX_SHARE_SIGMA_GRID = 100_000.0
"""Largest standard deviation of a noise share, in grid units, that the exact sampler of labeler.noise tabulates."""

LEAST_SIGMA_VOTES = 1e-6
"""Less noise than this hides nothing, and its grid would leave the range of ordinary numbers."""

MAX_GRID_SUM = 2**62
"""Sums stay below this, so that addition modulo 2^64 never wraps (the noise is truncated far below it)."""

_NOISE_REACH = 14.0
"""No noise sample is further from zero than this many standard deviations (see labeler.noise)."""

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Task(BaseModel):
    """One labelling task.

    Attributes:
        name: for people; part of the digest.
        classes: public list of class names, in label order. Never read off private data.
        method: how an agent votes (see labeler.ballots).
        k: neighbours that vote: records per query (knn), or queries per record (reverse-knn). Public,
            the same for every agent. Ignored for one-hot, where it is 1.
        sigma_votes: standard deviation of the noise on one coordinate of the sum that nobody can
            subtract, in votes: with `colluding_agents` pooled and `max_dropouts` gone this much is left.
        delta: the failure probability of the guarantee.
        max_queries: most queries asked in this task; the price is for all of them.
        release: what is opened: the noisy histogram or its winner.
        agents: N, how many agents take part.
        colluding_agents: how many of them may pool what they know without weakening the guarantee.
        max_dropouts: how many may fail to answer before nothing is opened.
        max_agent_records: public bound on the records one agent votes with. Only reverse-knn needs it,
            and only for a finite agent-level price; an agent with more votes with the first of them.
        talliers: how many parties hold one secret share of each ballot.
        grid_scale: grid units per vote (S). Chosen from sigma when absent.
        backbone_fingerprint: the backbone that made every feature, private and public.
        nonce: makes two otherwise equal tasks different, so that each draws its own noise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True, hide_input_in_errors=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]
    classes: Annotated[tuple[str, ...], Field(min_length=2, max_length=32_000)]
    method: Method = "knn"
    k: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    sigma_votes: Sigma
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    max_queries: Annotated[int, Field(ge=1, le=100_000_000)]
    release: ReleaseKind = "histogram"
    agents: Annotated[int, Field(ge=1, le=1_000_000)]
    colluding_agents: Annotated[int, Field(ge=0)] = 0
    max_dropouts: Annotated[int, Field(ge=0)] = 0
    max_agent_records: Annotated[int, Field(ge=1, le=2**40)] | None = None
    talliers: Literal[2, 3] = 3
    grid_scale: Annotated[int, Field(ge=1, le=2**40)] | None = None
    backbone_fingerprint: str = ""
    nonce: str = ""

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.sigma_votes < LEAST_SIGMA_VOTES:
            raise ValueError(f"sigma_votes must be at least {LEAST_SIGMA_VOTES:g} votes, found {self.sigma_votes:g}")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes must be different from each other")
        if any(not name for name in self.classes):
            raise ValueError("a class name must not be empty")
        if self.method == "one-hot" and self.k != 1:
            raise ValueError(f"k must be 1 for one-hot ballots, found {self.k}")
        if self.max_agent_records is not None and self.method != "reverse-knn":
            raise ValueError("max_agent_records only means something for method reverse-knn")
        if self.noise_contributors < 1:
            raise ValueError(
                f"too few agents for the collusion stated: {self.agents} agents less {self.colluding_agents} colluding "
                f"and {self.max_dropouts} dropouts leave {self.noise_contributors} whose noise nobody can subtract; "
                "at least 1 is needed: add agents or lower colluding_agents or max_dropouts"
            )
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Task:  # noqa: ARG002  # pydantic's signature; everything here is immutable
        """A validated copy: pydantic's own would keep the cached grid and digest of the task it came from."""
        return Task.model_validate(self.model_dump() | dict(update or {}))

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def quorum(self) -> int:
        """Fewest contributing agents for which anything is opened."""
        return self.agents - self.max_dropouts

    @property
    def noise_contributors(self) -> int:
        """h = N - colluding_agents - max_dropouts: contributors whose noise is certainly unknown to the adversary."""
        return self.agents - self.colluding_agents - self.max_dropouts

    @cached_property
    def scale(self) -> int:
        """S, grid units per vote.

        Raises:
            UnsafeGrid: a noise share would have a standard deviation below 100 grid units, or a sum
                could leave the range in which addition modulo 2^64 is ordinary addition.
        """
        per_share = self.sigma_votes / math.sqrt(self.noise_contributors)
        scale = self.grid_scale or max(1, math.ceil(DEFAULT_SHARE_SIGMA_GRID / per_share))
        if per_share * scale < MIN_SHARE_SIGMA_GRID:
            raise UnsafeGrid(
                f"grid_scale {scale} gives a noise share a standard deviation of {per_share * scale:.3g} grid units; "
                f"the guarantee needs at least {MIN_SHARE_SIGMA_GRID:g}. "
                f"Leave grid_scale out, or set it to {math.ceil(MIN_SHARE_SIGMA_GRID / per_share)} or more."
            )
        if per_share * scale > MAX_SHARE_SIGMA_GRID:
            raise UnsafeGrid(
                f"with grid_scale {scale} a noise share has a standard deviation of {per_share * scale:.3g} grid "
                f"units; the exact sampler reaches {MAX_SHARE_SIGMA_GRID:g}. Leave grid_scale out, or lower it."
            )
        most_votes = self.k if self.method == "knn" else 1
        if self.method == "reverse-knn":
            most_votes = self.max_agent_records or 2**40
        largest = self.agents * (most_votes * scale + _NOISE_REACH * per_share * scale)
        if largest >= MAX_GRID_SUM:
            raise UnsafeGrid(
                f"with grid_scale {scale} a sum could reach {largest:.3g} grid units; the limit is {MAX_GRID_SUM:.3g}. "
                "Use a smaller grid_scale, sigma_votes, k or max_agent_records."
            )
        return scale

    @property
    def share_sigma_grid(self) -> float:
        """Standard deviation of one agent's noise share, in grid units: S * sigma / sqrt(h)."""
        return self.scale * self.sigma_votes / math.sqrt(self.noise_contributors)

    @property
    def total_sigma_votes(self) -> float:
        """Standard deviation of the noise actually in a sum to which every agent contributed: sigma * sqrt(N / h)."""
        return self.sigma_votes * math.sqrt(self.agents / self.noise_contributors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of every field, in hexadecimal."""
        canonical = json.dumps(
            self.model_dump(mode="json") | {"scale": self.scale}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(b"labeler-task/1\n" + canonical.encode()).hexdigest()


def parse_task(fields: object) -> Task:
    """Validate a mapping (from TOML or JSON) into a task.

    Raises:
        InvalidTask: one sentence per field that is unknown, missing or out of bounds.
        UnsafeGrid: see Task.scale.
    """
    try:
        task = Task.model_validate(fields)
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "task")) from None
    _ = task.scale
    return task


def describe_validation(error: ValidationError, what: str) -> str:
    """Say in plain sentences which fields pydantic refused, without repeating their values."""
    sentences = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        field = ".".join(str(part) for part in problem["loc"]) or what
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{field}: unknown field; check its spelling against the documented fields")
        else:
            sentences.append(f"{field}: {problem['msg'].removeprefix('Value error, ')}")
    return f"{what} refused: " + "; ".join(sentences)
