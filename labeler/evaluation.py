"""Statistics of a private evaluation (`labeler.methods.evaluate`): what a noised histogram says, and how surely.

Everything here is computed from the release, so it costs nothing. Each number has two intervals of 95 %.

* **noise**: its value for exactly the scored records, which only the added noise hides.
* **sampling**: its value for further images like them, of which these records are a sample.

**Shares** (accuracy, recall, share right in a band). Let A be the noised count of those that are right, N of all,
from a and w cells (right, wrong) with noise of variance s^2 each. For the true share r, A - r N is normal with mean 0.
Its variance is

    V(r) = s^2 ((1 - r)^2 a + r^2 w),     and with sampling     V(r) + max(N, 0) r (1 - r).

The interval is every r within [0, 1] with (A - r N)^2 <= z^2 V(r): Fieller's for noise alone, Wilson's without
noise. Both are roots of a quadratic. If N itself is within z deviations of 0 the noise **drowns** the share:
nothing is said of it, and its interval is [0, 1].

**Balanced accuracy and AUROC** are no single ratio, so their intervals are simulated. They are quantiles of the number,
computed again from counts with added noise of the same variance (and with sampling a variance of the count itself).
Balanced accuracy is the mean of the recalls as they are stated, each within [0, 1]. AUROC is that of bands: records of
one band tie, and count half.

**Noise** is that of the agents that contributed, and never the amount that the price assumes.

References:
    Fieller 1954; Wilson 1927; Hanley and McNeil 1982.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.methods.evaluate import Layout, Scored

Counts = NDArray[np.float64]
Interval = tuple[float, float]

Z: Final = 1.959964
"""Quantile of 95 %."""

DRAWS: Final = 2000
_NUMBERS_AT_ONCE: Final = 2**22
WIDE_ENOUGH: Final = 0.05
"""Standard deviation of the recall of a class, by noise alone, up to which a finer layout is chosen."""

BANDS: Final = 5
"""Most bands of confidence, if noise allows."""

LEAST_SPREAD: Final = 0.03
"""Standard deviation of a band's share, by noise alone, up to which there may be more bands."""

_LIKELY: Final = 0.9
_EVERYTHING: Final[Interval] = (0.0, 1.0)

SPEAKS_FOR: Final = (
    "It speaks for images like the sites' own. Of public images of another kind, another camera or another country, "
    "it says nothing."
)


@dataclass(frozen=True)
class Estimate:
    """A number between 0 and 1 with its intervals.

    Attributes:
        value: None if noise drowns it.
        noise, sampling: see the module.
    """

    value: float | None
    noise: Interval = _EVERYTHING
    sampling: Interval = _EVERYTHING

    @property
    def is_drowned(self) -> bool:
        """Return whether noise leaves nothing to say."""
        return self.value is None

    def to_json(self) -> dict[str, Any]:
        """Return the form in evaluation.json."""
        value = None if self.value is None else round(self.value, 6)
        bounds = {name: [round(end, 6) for end in getattr(self, name)] for name in ("noise", "sampling")}
        return {"value": value, **bounds, "drowned": self.is_drowned}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The opened result of an evaluation.

    Attributes:
        asked: the model, and the cells.
        classes: names in label order.
        counts: the noised histogram, votes, in the shape of `asked.shape`.
        sigma: standard deviation of the noise in each count: that of the agents that contributed.
        contributors: number of those agents.
    """

    asked: Scored
    classes: tuple[str, ...]
    counts: Counts
    sigma: float
    contributors: int

    @classmethod
    def of(cls, asked: Scored, classes: Sequence[str], votes: Counts, *, sigma: float, contributors: int) -> Evaluation:
        """Read a release: noisy votes of shape (questions, classes)."""
        counts = asked.histogram(votes, num_classes=len(classes)).astype(np.float64)
        return cls(asked, tuple(classes), counts, sigma, contributors)

    @property
    def right(self) -> Counts:
        """Return counts of records that the model is right on, the band first; (bands,) or (bands, true)."""
        if self.asked.layout == "confusion":
            return np.asarray(np.diagonal(self.counts, axis1=0, axis2=2))
        return np.asarray(self.counts[1])

    @property
    def wrong(self) -> Counts:
        """Return the same for records that it is wrong on; for "confusion" with an axis of predicted classes first."""
        if self.asked.layout != "confusion":
            return np.asarray(self.counts[:1])
        size = len(self.classes)
        others = ~np.eye(size, dtype=np.bool_)
        # (predicted, band, true) -> (C - 1 predicted, band, true), for each true class the others in order.
        by_truth = [self.counts[others[:, truth], :, truth] for truth in range(size)]
        return np.stack(by_truth, axis=-1)

    def accuracy(self) -> Estimate:
        """Return the share of all records that the model is right on."""
        return self._share(self.right, self.wrong)

    def recall(self) -> list[Estimate]:
        """Return, for each class, the share that the model finds; empty if the layout leaves true classes out."""
        if self.asked.layout == "bands":
            return []
        return [self._share(self.right[:, one], self.wrong[:, :, one]) for one in range(len(self.classes))]

    def balanced_accuracy(self) -> Estimate | None:
        """Return the mean of recalls; None if the layout leaves true classes out."""
        recalls = self.recall()
        if not recalls:
            return None
        if any(one.is_drowned for one in recalls):
            return Estimate(None)
        sums = np.stack([self.right.sum(axis=0), self.wrong.sum(axis=(0, 1))])
        cells = np.array([[self.right.shape[0]], [self.wrong.shape[0] * self.wrong.shape[1]]])
        mean = float(np.mean([one.value for one in recalls]))
        return self._simulated(sums, cells, lambda found: (found[:, 0] / found.sum(axis=1)).mean(axis=1), value=mean)

    def auroc(self) -> Estimate | None:
        """Return the AUROC of the second class's score; None unless there are two classes."""
        if len(self.classes) != 2 or self.asked.layout == "bands":
            return None
        # Score of the second class, ascending: said to be the first, surely to hardly; then to be the second.
        if self.asked.layout == "confusion":
            ordered = np.concatenate([self.counts[0, ::-1], self.counts[1]])
        else:
            wrong, right = self.counts
            said_first = np.stack([right[:, 0], wrong[:, 1]], axis=1)
            said_second = np.stack([wrong[:, 0], right[:, 1]], axis=1)
            ordered = np.concatenate([said_first[::-1], said_second])
        totals = ordered.sum(axis=0)
        if (totals <= Z * self.sigma * math.sqrt(len(ordered))).any():
            return Estimate(None)
        return self._simulated(ordered.T, np.ones((2, 1)), area_under)

    def bands(self) -> list[Estimate]:
        """Return, for each band of confidence, the share that the model is right on."""
        return [self._share(self.right[one], self.wrong[:, one]) for one in range(self.asked.bands)]

    def _share(self, right: Counts, wrong: Counts) -> Estimate:
        return share(float(right.sum()), float(wrong.sum()), right.size, wrong.size, self.sigma)

    def _simulated(
        self, counts: Counts, cells: Counts, number: Callable[[Counts], Counts], *, value: float | None = None
    ) -> Estimate:
        """Return a number computed from counts, each a sum of `cells` cells, with its quantiles under noise.

        An interval holds the number itself, and that with sampling holds the one without, whatever the draws are.

        Args:
            number: of counts of shape (draws, ...), shape (draws,).
            value: the number; computed from the counts if None.
        """
        rng = np.random.default_rng(0)  # of public numbers; it protects nobody
        at_once = max(1, _NUMBERS_AT_ONCE // counts.size)
        found = []
        if value is None:
            value = min(1.0, max(0.0, float(number(counts[None])[0])))
        least = most = value
        with np.errstate(all="ignore"):
            for variance in (0.0, np.maximum(counts, 0.0)):
                spread = np.sqrt(self.sigma**2 * cells + variance)
                draws = [
                    number(counts + spread * rng.standard_normal((min(at_once, DRAWS - start), *counts.shape)))
                    for start in range(0, DRAWS, at_once)
                ]
                drawn = np.nan_to_num(np.concatenate(draws))
                beyond = (middle := np.median(drawn)) - np.clip(middle, 0.0, 1.0)  # as in `share`
                low, high = np.clip(np.quantile(drawn - beyond, [0.025, 0.975]), 0.0, 1.0)
                least, most = min(least, float(low)), max(most, float(high))
                found.append((least, most))
        return Estimate(value, *found)

    def recalibrated(self) -> list[list[float]]:
        """Return the confidence that each band deserves: the share that is right there; never less in a higher band.

        Usually one row of bands for all predictions. For two classes with the finest layout there is a row for each
        predicted class, because a rare one is predicted wrongly more often. If one is hardly predicted, it gets the row
        of both. If one is more often wrong than right, both get that row: stating less would take the label back.

        Bands that noise drowns are merged with a neighbor, and bands in the wrong order with each other, until each
        group stands out (pooling of adjacent violators). Certainty is never stated.
        """
        bands = range(self.asked.bands)
        whole = _pooled([_Bands.of(self.right[one], self.wrong[:, one], self.sigma) for one in bands])
        if self.asked.layout != "confusion" or len(self.classes) != 2:
            return [whole]
        rows = []
        for said in range(2):
            counts = self.counts[said]
            own = [_Bands.of(counts[one, said], counts[one, 1 - said], self.sigma) for one in bands]
            rows.append(whole if reduce(_Bands.joined, own).is_weak else _pooled(own))
        return rows if min(map(min, rows)) >= 1 / 2 else [whole]

    def to_json(self) -> dict[str, Any]:
        """Return the content of evaluation.json."""
        recall, balanced, auroc = self.recall(), self.balanced_accuracy(), self.auroc()
        spread = Z * self.sigma * math.sqrt(self.counts.size)
        total = float(self.counts.sum())
        limits = [0.0, *self.asked.edges, 1.0]
        return {
            "version": "labeler-evaluation/1",
            "classes": list(self.classes),
            "layout": self.asked.layout,
            "edges": list(self.asked.edges),
            "sigma": self.sigma,
            "contributors": self.contributors,
            "records": {"value": round(total), "noise": [round(total - spread), round(total + spread)]},
            "accuracy": self.accuracy().to_json(),
            "balanced_accuracy": None if balanced is None else balanced.to_json(),
            "auroc": None if auroc is None else auroc.to_json(),
            "recall": [{"class": name} | one.to_json() for name, one in zip(self.classes, recall, strict=False)],
            "confusion": self._confusion(),
            "bands": [
                {"from": limits[number], "to": limits[number + 1]} | one.to_json()
                for number, one in enumerate(self.bands())
            ],
            "stated": [[round(one, 6) for one in row] for row in self.recalibrated()],
            "counts": np.round(self.counts, 3).tolist(),
            "speaks_for": SPEAKS_FOR,
        }

    def _confusion(self) -> list[dict[str, Any]]:
        """Return records of each true and predicted class; those that noise drowns say so."""
        if self.asked.layout != "confusion":
            return []
        sums, spread = self.counts.sum(axis=1), Z * self.sigma * math.sqrt(self.asked.bands)
        return [
            {
                "true": truth,
                "predicted": said,
                "value": round(float(sums[column, row])),
                "noise": [round(float(sums[column, row] - spread)), round(float(sums[column, row] + spread))],
                "drowned": bool(sums[column, row] < spread),
            }
            for row, truth in enumerate(self.classes)
            for column, said in enumerate(self.classes)
        ]


@dataclass(frozen=True)
class _Bands:
    """Neighboring bands together: noised counts, with the number of cells in each sum."""

    right: float
    wrong: float
    right_cells: int
    wrong_cells: int
    sigma: float
    count: int = 1

    @classmethod
    def of(cls, right: Any, wrong: Any, sigma: float) -> _Bands:
        return cls(float(np.sum(right)), float(np.sum(wrong)), int(np.size(right)), int(np.size(wrong)), sigma)

    def joined(self, other: _Bands) -> _Bands:
        return _Bands(
            self.right + other.right,
            self.wrong + other.wrong,
            self.right_cells + other.right_cells,
            self.wrong_cells + other.wrong_cells,
            self.sigma,
            self.count + other.count,
        )

    @property
    def is_weak(self) -> bool:
        return share(self.right, self.wrong, self.right_cells, self.wrong_cells, self.sigma).is_drowned

    @property
    def deserved(self) -> float:
        """Return the share that is right, but never certainty: a quarter of its deviation by noise remains."""
        total = self.right + self.wrong
        if total <= 0:
            return 0.0
        within = min(1.0, max(0.0, self.right / total))
        spread = self.sigma * math.sqrt((1 - within) ** 2 * self.right_cells + within**2 * self.wrong_cells) / total
        return max(0.0, min(within, 1 - spread / 4))


def _pooled(bands: Sequence[_Bands]) -> list[float]:
    """Return the confidence that each band deserves, ascending."""
    groups: list[_Bands] = []
    for number, one in enumerate(bands, 1):
        groups.append(one)
        is_last = number == len(bands)
        while len(groups) > 1 and (
            groups[-2].is_weak or groups[-2].deserved > groups[-1].deserved or (is_last and groups[-1].is_weak)
        ):
            last = groups.pop()
            groups[-1] = groups[-1].joined(last)
    return [group.deserved for group in groups for _ in range(group.count)]


def share(right: float, wrong: float, right_cells: int, wrong_cells: int, sigma: float) -> Estimate:
    """Return a share with its intervals; see the module.

    Args:
        right, wrong: noised counts, sums of `right_cells` and `wrong_cells` cells.
        sigma: of one cell.
    """
    total = right + wrong
    if total <= Z * sigma * math.sqrt(right_cells + wrong_cells):
        return Estimate(None)
    # Noise may take the estimate out of [0, 1]: the interval moves to the edge with it, and so never has width zero.
    inside = min(total, max(0.0, right))
    bounds = (_interval(inside, total, right_cells, wrong_cells, sigma, sampled=sampled) for sampled in (0.0, total))
    return Estimate(inside / total, *bounds)


def _interval(
    right: float, total: float, right_cells: int, wrong_cells: int, sigma: float, *, sampled: float
) -> Interval:
    """Return all r with (A - r N)^2 <= z^2 (V(r) + sampled r (1 - r)), cut to [0, 1]."""
    noise = (Z * sigma) ** 2
    drawn = Z**2 * sampled
    square = total**2 - noise * (right_cells + wrong_cells) + drawn
    linear = -2 * right * total + 2 * noise * right_cells - drawn
    constant = right**2 - noise * right_cells
    # A positive leading coefficient, since the total stands out; r = A / N solves it, so that there are roots.
    root = math.sqrt(max(0.0, linear**2 - 4 * square * constant))
    low, high = (-linear - root) / (2 * square), (-linear + root) / (2 * square)
    return min(1.0, max(0.0, low)), max(0.0, min(1.0, high))


def area_under(counts: Counts) -> Counts:
    """Return AUROC of counts by ascending score, shape (..., 2, bins): of both classes; ties count half."""
    first, second = counts[..., 0, :], counts[..., 1, :]
    below = np.cumsum(first, axis=-1) - first / 2
    return np.asarray((second * below).sum(axis=-1) / (first.sum(axis=-1) * second.sum(axis=-1)))


def choose_layout(num_classes: int, *, sigma: float, records: int, bands: int = BANDS) -> Layout:
    """Return the finest layout in which noise gives a class's recall a deviation of WIDE_ENOUGH; else the coarsest.

    For two classes always the finest: it has no more than twice as many cells as the coarsest, and AUROC needs it.

    Args:
        sigma: of one count.
        records: of all agents together, as far as anybody may know.
    """
    if num_classes == 2:
        return "confusion"
    for layout in ("confusion", "classes"):
        if share_spread(layout, bands, num_classes, sigma=sigma, records=records / num_classes) <= WIDE_ENOUGH:
            return layout
    return "bands"


def choose_bands(num_classes: int, *, sigma: float, records: int) -> int:
    """Return the number of bands, of equally many records: each share is known to LEAST_SPREAD, and BANDS at most."""
    cells = 2 if num_classes == 2 else 1  # of a band, right and wrong: as `choose_layout` has them
    return max(1, min(BANDS, int(LEAST_SPREAD * records / (sigma * math.sqrt(cells / 2)))))


def share_spread(layout: Layout, cells: int, num_classes: int, *, sigma: float, records: float) -> float:
    """Return the standard deviation that noise gives a share near 0.9 of `records` records.

    Args:
        cells: in which a record that is right may lie.
    """
    wrong = cells * (num_classes - 1 if layout == "confusion" else 1)
    return sigma * math.sqrt((1 - _LIKELY) ** 2 * cells + _LIKELY**2 * wrong) / max(1.0, records)


def say(evaluation: dict[str, Any]) -> list[str]:
    """Return evaluation.json in sentences, for people."""

    def told(one: dict[str, Any]) -> str:
        if one["drowned"]:
            return "drowned by noise"
        low, high = one["noise"]
        further = one["sampling"]
        return (
            f"{one['value']:.1%} ({low:.1%} to {high:.1%} of these records; "
            f"{further[0]:.1%} to {further[1]:.1%} of images like them)"
        )

    lines = [f"Accuracy  {told(evaluation['accuracy'])}"]
    for name, words in (("balanced_accuracy", "Balanced"), ("auroc", "AUROC")):
        if evaluation[name] is not None:
            lines.append(f"{words:9s} {told(evaluation[name])}")
    lines += [f"Recall    {one['class']}: {told(one)}" for one in evaluation["recall"]]
    of_class = [""] if len(evaluation["stated"]) == 1 else [f" for {name}" for name in evaluation["classes"]]
    for number, one in enumerate(evaluation["bands"]):
        now = ", ".join(f"{row[number]:.0%}{name}" for row, name in zip(evaluation["stated"], of_class, strict=True))
        lines.append(f"Stated    {one['from']:.0%} to {one['to']:.0%}: right {told(one)}; stated from now on {now}")
    drowned = sum(one["drowned"] for one in evaluation["confusion"])
    if drowned:
        lines.append(f"Noise     drowns {drowned} of {len(evaluation['confusion'])} cells of the confusion matrix")
    records = evaluation["records"]
    lines.append(f"Records   about {records['value']:,} ({records['noise'][0]:,} to {records['noise'][1]:,})")
    return [*lines, evaluation["speaks_for"]]
