"""The expected share of right labels of a job, before anything is paid, from public facts and the noise alone.

Nothing here reads a private record, asks anybody or is charged for. Two facts are known beforehand: the number of votes
per question, and the noise added to each count. Let M be the votes of one question, sigma the whole noise of one
count and p the share of the votes that its class gets. The class stands out by d = M (p - (1 - p) / (C - 1)) / sigma.
With phi and Phi of the normal distribution an answer is right with this probability.

    W(d) = integral of phi(t) Phi(t + d)^(C - 1) dt.

The right class carries more noisy votes than each other one. A student does better than single answers, because a class
is spread over about Q / C questions whose noise averages out. Two cases are stated.

    low:  single answers, p = UNLIKE;        high:  sqrt(2) d sqrt(Q / C), p = ALIKE.

The root of 2 is what the best student gains that knows that each class is one group. It matches groups to classes. Two
groups are confused where the sum of two counts beats that of two others: a lead of 2 d against noise of deviation 2.
For a single answer it is a lead of d against sqrt(2). So each pair is confused as seldom as at a lead of sqrt(2) d. For
two classes W is exact, for more a bound from above, since a student also confuses three groups at once.

    accuracy = W p + (1 - W) (1 - p) / (C - 1).    If another class won, the label is right as often as its share.

W is a mean over jobs. In one job each of C classes is found or not, so low and high stand for the share of classes
W -+ SPREAD sqrt(W (1 - W) / C), within 0 and 1: nine jobs of ten are between.

If public images are at hand their geometry replaces the bounds (feature_store.students.labeling).

**How many votes.** A method in which k neighbors of each agent vote casts N k votes at every question, an ensemble N.
If records choose (reverse-knn), R records cast R k votes over Q questions, and R is private. It is assumed to be
RECORDS_EACH per agent or a number that the caller gives, and never read from a shard.

**How many questions** (`questions_for`), for methods whose records choose theirs: from public facts alone, so that
choosing costs nothing. Asking less makes each count stand out of its noise; asking more tells what lies inside a group
of images. With M the votes that are expected for one class and sigma the whole noise of one count, both known before
anybody is asked, the ratio rho = M / sigma decides. The rule, for C classes:

    C questions if rho < FEW: only which group is which class can be learned, and each group must be heard.
    EACH_CLASS C max(1, sqrt(rho / FINER)) beyond: noise matters less and less, and groups may be finer.

A class that is split over j questions stands out by M / sqrt(j) instead of M, so each further question costs whole
classes: at epsilon 0.1, two questions a class mistook one class for another in one draw of a few. But a group of public
images that holds two classes never tells them apart, and a few spare groups part most of these.

There is at most one for FEWEST_IMAGES public images (or C). The price of reverse-knn is the same for any number. M is
private: RECORDS_EACH of an agent are assumed, or the caller's number. The constants were chosen on Office-Caltech10,
CIFAR-10, chest X-rays and digits.

**How many axes** (`axes_for`), for class means. Their price is the same along any number. More axes tell classes apart
that few confuse, and each adds noise to the mean of a class. Measured, the best number grows as the records of a class
over the noise, R / (C sigma). Half of that is taken, since R is assumed; one class may be rare, so C counts as at least
RAREST. It is at least FEWEST_AXES and C, at most USUAL_AXES and what the public images have. The constants were chosen
on Office-Caltech10, the test images of CIFAR-10 and chest X-rays.

**Whether sites find their own offset** (`offset_for`), where records choose. The part s of the price that pays for it
leaves noise of this length on the mean of a site's n records, along A axes and in units of a feature's length:

    u / sqrt(s),      u = sigma sqrt(A) / (2 n sqrt(min(k, Q) 16 / 17))      (labeler.methods.site_offset).

Photos of other cameras lie 0.1 to 0.2 off, drawings 0.3 to 0.5. So s is the least for which that length is
OFFSET_NOISE, between LEAST_SHARE and MOST_SHARE. If even MOST_SHARE leaves more than MOST_OFFSET_NOISE, votes get the
whole price. n is assumed as above. The constants were chosen on Office-Caltech10, plain and redrawn in four styles, and
held on CIFAR-10 and chest X-rays, also where each site has mostly one class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from labeler.budget import MOST_EPSILON
from labeler.errors import LabelerError
from labeler.evaluation import Z, choose_bands, choose_layout, share_spread
from labeler.methods.sensitivity import answers_with_a_model
from labeler.methods.site_offset import noise_of_mean
from labeler.planning import statement
from labeler.task import Task, parse_task

RECORDS_EACH: Final = 1000
"""Assumed records of an agent if no other number is given."""

ALIKE: Final = 0.97
"""Share of the votes that a question's class gets if private images are like the public ones."""

UNLIKE: Final = 0.75
"""The same if they are of another kind: another camera, another country."""

SPREAD: Final = 1.645
"""Standard deviations on either side within which nine of ten normal numbers lie."""

WILL_DO: Final = 0.9
"""Chance that a class stands out of the noise, above which there is no warning."""

NOTHING_OF_ATTRIBUTES: Final = (
    "how often noise turns an attribute round depends on how many votes it gets, of which nothing is known"
)

MOST_TELLING_DELTA: Final = 1 / RECORDS_EACH
"""A guarantee at delta allows giving away each private image with that probability. From this delta on, one image of an
agent with the assumed number of images is expected to be given away."""

MOST_OPEN: Final = 20.0
"""Points on either side of an evaluation's accuracy, above which there is a warning."""

OFFSET_NOISE: Final = 0.06
MOST_OFFSET_NOISE: Final = 0.1
LEAST_SHARE: Final = 0.05
MOST_SHARE: Final = 0.15

_STEPS: Final = 400
_REACH: Final = 9.0


@dataclass(frozen=True)
class Expectation:
    """The expected share of right labels.

    Attributes:
        low, high: shares of all images; None if nothing can be said.
        reason: why nothing can be said; else empty.
        records: number of private records assumed; None if the number of votes is public.
        warning: the remedy if noise drowns the votes, or delta promises little; else empty.
        stability: the least and the largest share of labels that two draws of the noise agree on, as rehearsed; None
            where nothing was rehearsed.
    """

    low: float | None
    high: float | None
    reason: str = ""
    records: int | None = None
    warning: str = ""
    stability: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the shape of `expected_accuracy`."""
        return {"low": self.low, "high": self.high, "reason": self.reason, "records": self.records}


def expect(task: Task, *, queries: int | None = None, records: int | None = None) -> Expectation:
    """Return the expected share of right labels of a job of a task.

    Args:
        queries: number of questions; the task's max_queries if None.
        records: of all agents together, as far as anybody may know; RECORDS_EACH of each agent if None.
    """
    found = _expect(task, task.max_queries if queries is None else queries, records)
    if task.delta <= MOST_TELLING_DELTA:
        return found
    said = (
        f"delta {task.delta:g} promises little: giving each private image away with probability {task.delta:g} would "
        "keep it; take a delta far below one over the number of private images, such as 1e-5"
    )
    return replace(found, warning=f"{said}; {found.warning}" if found.warning else said)


def _expect(task: Task, asked: int, records: int | None) -> Expectation:
    if task.traits.labels is None:
        return _of_evaluation(task, records)
    if answers_with_a_model(task):
        return Expectation(None, None, f"nobody has stated how noise moves the labels of method {task.method}")
    if task.attributes_per_record is not None:
        return Expectation(None, None, NOTHING_OF_ATTRIBUTES)
    assumed = voting_records(task, records)
    low = _right(task, asked, assumed, share=UNLIKE, pooled=False, sigma=task.total_sigma_votes)
    high = _right(task, asked, assumed, share=ALIKE, pooled=True, sigma=task.total_sigma_votes)
    warning = ""
    stands_out = _stands_out(task, asked, assumed, task.total_sigma_votes)
    if stands_out < WILL_DO:
        warning = _warning(task, asked, assumed, is_told=records is not None, most=stands_out < 0.5)
    return Expectation(round(low, 3), round(high, 3), records=assumed, warning=warning)


def _of_evaluation(task: Task, records: int | None) -> Expectation:
    """Return how precisely an accuracy near 0.9 will be known: by noise alone, with the cells that would be chosen."""
    assumed, sigma, classes = assumed_records(task, records), task.total_sigma_votes, task.num_classes
    bands = choose_bands(classes, sigma=sigma, records=assumed)
    layout = choose_layout(classes, sigma=sigma, records=assumed, bands=bands)
    cells = bands if layout == "bands" else bands * classes
    open_points = 100 * Z * share_spread(layout, cells, classes, sigma=sigma, records=assumed)
    reason = (
        f"an evaluation labels nothing; noise will leave its accuracy within about {open_points:.2g} points, assuming "
        f"{assumed:,} private images in all"
    )
    drowned = "the noise drowns the evaluation: take a larger epsilon, or more records"
    return Expectation(None, None, reason, records=assumed, warning=drowned if open_points > MOST_OPEN else "")


def assumed_records(task: Task, records: int | None = None) -> int:
    """Return the records of all agents together, given or assumed; no more than the task lets vote."""
    told = RECORDS_EACH * task.agents if records is None else records
    return told if task.max_agent_records is None else min(told, task.max_agent_records * task.agents)


def voting_records(task: Task, records: int | None = None) -> int | None:
    """Return `assumed_records` where they choose the questions at which they vote; None where all get equally many."""
    return task.traits.choosing(assumed_records(task, records))


@lru_cache(maxsize=4096)
def winning_chance(distance: float, classes: int) -> float:
    """Return W(d) of the module, by the trapezoid rule.

    Args:
        distance: d, in standard deviations of one count.
        classes: C.
    """
    step = 2 * _REACH / _STEPS
    total = 0.0
    for number in range(_STEPS + 1):
        t = -_REACH + number * step
        below = 0.5 * math.erfc(-(t + distance) / math.sqrt(2))
        total += math.exp(-0.5 * t * t) * below ** (classes - 1) * (0.5 if number in (0, _STEPS) else 1.0)
    return min(1.0, total * step / math.sqrt(2 * math.pi))


def _stands_out(task: Task, queries: int, records: int | None, sigma: float) -> float:
    return _chance(task, queries, records, share=ALIKE, pooled=True, sigma=sigma)


def _chance(task: Task, queries: int, records: int | None, *, share: float, pooled: bool, sigma: float) -> float:
    classes = task.num_classes
    lead = task.traits.votes(task, queries, records or 0) * (share - (1 - share) / (classes - 1))
    together = math.sqrt(max(1.0, queries / classes)) if pooled else 1.0
    return winning_chance(min(lead * together / sigma, 2 * _REACH), classes)


def _right(task: Task, queries: int, records: int | None, *, share: float, pooled: bool, sigma: float) -> float:
    # The best student also matches groups to classes; see the module.
    noise = sigma / math.sqrt(2) if pooled else sigma
    chance = _chance(task, queries, records, share=share, pooled=pooled, sigma=noise)
    spread = SPREAD * math.sqrt(chance * (1 - chance) / task.num_classes)
    chance = min(1.0, chance + spread) if pooled else max(0.0, chance - spread)
    return chance * share + (1 - chance) * (1 - share) / (task.num_classes - 1)


def _warning(task: Task, queries: int, records: int | None, *, is_told: bool, most: bool) -> str:
    votes = task.traits.votes(task, queries, records or 0)
    said = (
        f"the noise drowns the votes: each count carries noise of {_number(task.total_sigma_votes)}, and about "
        f"{_number(votes)} votes meet in a question"
    )
    if records is not None:
        said += f" ({'with' if is_told else 'assuming'} {records:,} private images in all)"
    ways = _ways(task, queries, records)
    return f"{said}; {'most' if most else 'many'} labels would be wrong; " + (
        f"{' or '.join(ways)} would do" if ways else "no price does: ask fewer questions, or more agents"
    )


def _ways(task: Task, queries: int, records: int | None) -> list[str]:
    """Return sentences on which epsilon, or which number of records, compensates for the noise."""
    # The largest noise of one count, all shares together, at which a class stands out.
    sigma, high = 0.0, task.total_sigma_votes
    for _ in range(60):
        middle = (sigma + high) / 2
        sigma, high = (middle, high) if _stands_out(task, queries, records, middle) >= WILL_DO else (sigma, middle)
    if sigma == 0:
        return []
    ways = []
    alone = sigma * task.sigma_votes / task.total_sigma_votes
    try:
        # The grid belongs to the noise, so it is chosen again.
        quieter = parse_task(task.model_dump(exclude={"grid_scale"}) | {"sigma_votes": alone})
        epsilon = statement(quieter, "instance", queries).epsilon
        if math.isfinite(epsilon) and epsilon <= MOST_EPSILON:
            # Two digits, rounded up.
            step = 10.0 ** (math.floor(math.log10(epsilon)) - 1)
            ways.append(f"epsilon {math.ceil(epsilon / step * (1 - 1e-9)) * step:g} per private image")
    except LabelerError:
        pass
    if records is not None:
        ways.append(f"{math.ceil(records * task.total_sigma_votes / sigma):,} private images in all at this epsilon")
    return ways


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def say_expected(expected: Mapping[str, Any]) -> str:
    """Return `Expectation.to_json` as a sentence."""
    if expected["low"] is None and expected["records"] is not None:
        return f"What it will tell: {expected['reason']}."
    if expected["low"] is None:
        return f"How many labels will be right: nothing can be said beforehand; {expected['reason']}."
    records = "" if expected["records"] is None else f", assuming {expected['records']:,} private images in all"
    return f"Labels expected to be right: {expected['low']:.0%} to {expected['high']:.0%}{records}."


def say_stability(low: float, high: float) -> str:
    """Return how alike two draws of the noise label the images, as a sentence."""
    span = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    return f"Another draw of the noise would give about {span} of the labels the same."


FEWEST_IMAGES: Final = 5
"""Fewest public images per question, on average."""

FEW: Final = 7.0
"""rho below which there is one question for each class."""

EACH_CLASS: Final = 1.4
"""Questions for each class beyond."""

FINER: Final = 12.0
"""rho from which on there are more."""


FEWEST_AXES, USUAL_AXES = 8, 64
RAREST: Final = 10
"""A class may hold so small a part of the records: one in ten."""


def axes_for(task: Task, *, known: int, records: int | None = None) -> int:
    """Return the number of public axes along which class means are asked for, see the module.

    Args:
        task: of learner "means", with any number of axes, which is not read.
        known: axes of the public images.
        records: private records of all agents together, as far as anybody may know.
    """
    heard = assumed_records(task, records) / max(task.num_classes, RAREST) / (2 * task.total_sigma_votes)
    return min(max(FEWEST_AXES, task.num_classes, min(round(heard), USUAL_AXES)), known)


def offset_for(task: Task, *, records: int | None = None) -> float | None:
    """Return the part of the price for which sites find their own offset, see the module; None for no offset.

    Args:
        task: priced without an offset.
        records: private records of all agents together, as far as anybody may know.
    """
    voting = voting_records(task, records)
    if voting is None or task.lifetime_budget is not None or task.max_queries < 2:
        return None
    length = noise_of_mean(task.sigma_votes, min(task.k, task.max_queries), task.max_queries) * task.agents / voting
    share = round(min(max((length / OFFSET_NOISE) ** 2, LEAST_SHARE), MOST_SHARE), 2)
    return share if length <= MOST_OFFSET_NOISE * math.sqrt(share) else None


def questions_for(task: Task, *, public_images: int | None = None, records: int | None = None) -> int:
    """Return the number of clusters of public images to ask about.

    Args:
        task: what all parties agree on; its `max_queries` is not read if records choose.
        public_images: their number; None if it is not known yet.
        records: private records of all agents together, as far as anybody may know.
    """
    classes = task.num_classes
    wanted = 2 * classes
    if (voting := voting_records(task, records)) is not None:
        rho = voting * task.k / classes / task.total_sigma_votes
        wanted = classes if rho < FEW else round(EACH_CLASS * classes * max(1.0, math.sqrt(rho / FINER)))
    return wanted if public_images is None else min(wanted, max(classes, public_images // FEWEST_IMAGES))
