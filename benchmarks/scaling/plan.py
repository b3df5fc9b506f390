"""On paper: 100 million records, 10,000 agents and a million jobs a day, counted from what was measured on two cores.

Nothing here is a measurement. Each part of the service is named with what one of its units cost here, how many units
a day has, and how many cores or gigabytes that makes at constant load; peaks and failures come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RECORDS: Final = 100_000_000
AGENTS: Final = 10_000
JOBS_A_DAY: Final = 1_000_000
QUERIES: Final = 8
DIMENSION: Final = 1280
CLASSES: Final = 10
DAY_S: Final = 86_400
TALLIERS: Final = 3


@dataclass(frozen=True)
class UnitCosts:
    """What was measured.

    Attributes:
        image_s: CPU seconds to decode, prepare and embed an image.
        product_s: CPU seconds of an exact search per record, query and number of a feature.
        round_s: CPU seconds of an agent's and the talliers' arithmetic for one agent in one round: noise, masks, sums.
        coordinator_job_s, coordinator_agent_s: CPU seconds of the coordinator per job, and for each agent asked.
        agent_s: CPU seconds of an agent's process per job.
        tallier_s: CPU seconds of a tallier's process per agent and job.
        journal_bytes: of the coordinator's journal per job.
        asked_bytes, shares_bytes: what one agent receives and sends for a job of QUERIES queries.
    """

    image_s: float
    product_s: float
    round_s: float
    coordinator_job_s: float
    coordinator_agent_s: float
    agent_s: float
    tallier_s: float
    journal_bytes: float
    asked_bytes: int
    shares_bytes: int


@dataclass(frozen=True)
class Part:
    """A part of the service at that size.

    Attributes:
        name: which, and who runs it.
        unit: of what is counted.
        each: cost of a unit, in CPU seconds or bytes.
        a_day: how many.
        needed: cores, or what `of` says.
        of: cores, cores at every agent, GB/s, TB a day, TB.
        then: what grows with it, and what would make it less.
    """

    name: str
    unit: str
    each: float
    a_day: float
    needed: float
    of: str
    then: str


def paper_plan(costs: UnitCosts) -> list[Part]:
    """Every part, in the order in which a job meets them."""
    answers = JOBS_A_DAY * AGENTS
    scored = JOBS_A_DAY * QUERIES * DIMENSION * (RECORDS / AGENTS)
    traffic = costs.asked_bytes + 2 * costs.shares_bytes
    return [
        _cores(
            "embedders (coordinator's site)", "image", costs.image_s, JOBS_A_DAY * QUERIES,
            "processes side by side, or one GPU; none where requesters bring features",
        ),
        Part(
            "search (every agent, its own records)", "record x query x number", costs.product_s, scored,
            costs.product_s * scored / DAY_S, "cores at every agent", "parts of a shard on more cores or GPUs",
        ),
        Part(
            "an agent's process (every agent)", "job", costs.agent_s, JOBS_A_DAY,
            costs.agent_s * JOBS_A_DAY / DAY_S, "cores at every agent", "less per job where a turn carries many jobs",
        ),
        _cores(
            "talliers, each", "share", costs.tallier_s, answers,
            "sums of groups add up: a tallier's shares on as many machines as wanted",
        ),
        _cores(
            "arithmetic of a share alone: noise, masks, sums", "share", costs.round_s / (TALLIERS + 1), answers,
            "the floor below which no messaging brings it",
        ),
        _cores(
            "coordinators, per agent asked", "agent's answer", costs.coordinator_agent_s, answers,
            "coordinators side by side on PostgreSQL; linear in how many agents a job asks",
        ),
        _cores("coordinators, per job", "job", costs.coordinator_job_s, JOBS_A_DAY, "the same"),
        Part(
            "network of the coordinators", "agent's answer", traffic, answers, traffic * answers / DAY_S / 1e9, "GB/s",
            "shares pass through the coordinator; a relay per region, or fewer agents per job",
        ),
        Part(
            "the coordinators' journal", "job", costs.journal_bytes, JOBS_A_DAY,
            costs.journal_bytes * JOBS_A_DAY / 1e12, "TB a day", "PostgreSQL, partitioned by month",
        ),
        Part(
            "shards (all agents together)", "record", 2 * DIMENSION, RECORDS, 2.0 * DIMENSION * RECORDS / 1e12, "TB",
            f"{2 * DIMENSION * RECORDS / AGENTS / 1e6:.0f} MB at every agent",
        ),
    ]  # fmt: skip


def _cores(name: str, unit: str, each: float, a_day: float, then: str) -> Part:
    return Part(name, unit, each, a_day, each * a_day / DAY_S, "cores", then)
