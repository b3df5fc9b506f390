"""Scores of each class where the truth is known, and a way to find one class better.

Where classes are unequal, the share that is right says little: of nine healthy images to one that is not, "healthy" is
right nine times in ten. So the recall of each class is given too: of the images that are of it, the share so labeled.
Its mean is the balanced accuracy. For two classes the AUROC is the chance that an image of the second class is given
more of it than one of the first, ties counting half (Hanley, McNeil 1982).

A **preference** moves the threshold of one class. It reads a model's probabilities and public truth alone, so it is
post-processing and costs no privacy. Let p be the probability that the model itself gives the class. An image gets the
class where p is at least t, else the most probable of the others. For a recall of r the threshold t follows.

* Given n labeled public images of the class, t is the k-th largest of their p, with k the least whole number that is
  at least r (n + 1). A new image of the class that is exchangeable with these ranks at each of n + 1 places alike. So
  it is found with a chance of at least k / (n + 1), hence at least r (split conformal prediction: Papadopoulos et al.
  2002; Vovk et al. 2005). It needs k <= n, which is n >= r / (1 - r).
* Without any, t is the largest at which the images with p >= t hold at least r of the sum of all stated probabilities
  of the class. Stated is p, or what an evaluation found it to be worth. It is right as far as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting

UNEQUAL: Final = 0.02
"""Where accuracy and balanced accuracy differ by so much, whoever says the one says the other."""


@dataclass(frozen=True)
class Scores:
    """Labels of images whose truth is known.

    Attributes:
        classes: names, in label order.
        counts: images of each class.
        found: how many of those got its label.
        auroc: of two classes that both occur; None otherwise.
    """

    classes: tuple[str, ...]
    counts: tuple[int, ...]
    found: tuple[int, ...]
    auroc: float | None = None

    @property
    def checked(self) -> int:
        """Images whose truth is known."""
        return sum(self.counts)

    @property
    def accuracy(self) -> float:
        """Share that is right."""
        return sum(self.found) / self.checked

    @property
    def recalls(self) -> tuple[float | None, ...]:
        """Of each class; None where no image is of it."""
        return tuple(hits / own if own else None for hits, own in zip(self.found, self.counts, strict=True))

    @property
    def balanced(self) -> float:
        """Mean recall of the classes that occur."""
        known = [one for one in self.recalls if one is not None]
        return sum(known) / len(known)

    def to_json(self) -> dict[str, Any]:
        """For report.json and commands."""
        recalls = dict(zip(self.classes, self.recalls, strict=True))
        said = {"accuracy": self.accuracy, "checked": self.checked, "balanced_accuracy": self.balanced}
        return said | {"recall": recalls} | ({} if self.auroc is None else {"auroc": self.auroc})

    def in_lines(self) -> list[str]:
        """For a terminal: all classes together, then each."""
        area = "" if self.auroc is None else f", AUROC {self.auroc:.3f}"
        said = f"{self.accuracy:.1%} of {self.checked} that can be checked are right; balanced accuracy"
        rows = zip(self.classes, self.counts, self.found, self.recalls, strict=True)
        each = [f"  {hits} of {own} {name} found ({one:.1%})" for name, own, hits, one in rows if one is not None]
        return [f"{said} {self.balanced:.1%}{area}", *each]


def score(
    truth: NDArray[np.integer], labels: NDArray[np.integer], probability: NDArray[np.floating], classes: Sequence[str]
) -> Scores | None:
    """The scores of some labels; None where no truth is known.

    Args:
        truth: shape (n,), -1 where it is not known.
        labels: shape (n,).
        probability: shape (n,), of the last class; read where there are two.
        classes: names in label order.
    """
    known = truth >= 0
    if not known.any():
        return None
    counts = np.bincount(truth[known], minlength=len(classes))
    found = np.bincount(truth[known & (truth == labels)], minlength=len(classes))
    area = auroc(truth[known] == 1, probability[known]) if len(classes) == 2 else None
    return Scores(tuple(classes), tuple(counts.tolist()), tuple(found.tolist()), area)


def score_probabilities(
    truth: NDArray[np.integer], probabilities: NDArray[np.floating], classes: Sequence[str]
) -> Scores | None:
    """`score` of the most probable classes, shape (n, num_classes)."""
    return score(truth, probabilities.argmax(axis=1), probabilities[:, -1], classes)


def auroc(is_second: NDArray[np.bool_], probability: NDArray[np.floating]) -> float | None:
    """See the module; None where one of the two does not occur. Shape (n,) each."""
    ordered = np.sort(probability[~is_second])
    second = probability[is_second]
    if not len(ordered) or not len(second):
        return None
    below = np.searchsorted(ordered, second, side="left") + np.searchsorted(ordered, second, side="right")
    return float(below.mean() / (2 * len(ordered)))


@dataclass(frozen=True)
class Preference:
    """A recall that is wanted of one class; see the module.

    Attributes:
        recall: as it was written, above 0 and below 1.
        name: of the class; empty for the one with the least probability over all images.
    """

    recall: Fraction
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Preference:
        """`recall=0.9`, or `CLASS:recall=0.9`.

        Raises:
            InvalidSetting: it is neither, or the recall is out of bounds.
        """
        found = re.fullmatch(r"(?:(.+):)?recall=([0-9]*\.?[0-9]+)", text.strip())
        recall = Fraction(found[2]) if found else Fraction(0)
        if found is None or not 0 < recall < 1:
            raise InvalidSetting(
                f"--prefer takes recall=0.9 for the rarest class, or CLASS:recall=0.9, with a number between 0 and 1; "
                f"found {text[:100]!r}"
            )
        return cls(recall, found[1] or "")

    def place(self, probabilities: NDArray[np.floating], classes: Sequence[str]) -> int:
        """The place of the class in the list.

        Raises:
            InvalidSetting: there is no class of that name.
        """
        if not self.name:
            return int(probabilities.sum(axis=0).argmin())
        if self.name not in classes:
            raise InvalidSetting(f"--prefer names the class {self.name[:100]!r}, and there are {', '.join(classes)}")
        return list(classes).index(self.name)

    def threshold(self, of_class: NDArray[np.floating]) -> float:
        """From labeled images of the class: t of the module. Shape (n,), their probability of it.

        Raises:
            BadData: too few of them.
        """
        rank = math.ceil(self.recall * (len(of_class) + 1))
        if rank > len(of_class):
            needed = math.ceil(self.recall / (1 - self.recall))
            raise BadData(
                f"a recall of {float(self.recall):g} needs at least {needed} labeled images of the class, and there "
                f"are {len(of_class)}; label more, or ask for less"
            )
        return float(np.sort(of_class)[len(of_class) - rank])

    def stated_threshold(self, own: NDArray[np.floating], stated: NDArray[np.floating]) -> float:
        """From what the model has of the class and what is stated of it, over all images: t of the module."""
        order = np.argsort(-own, kind="stable")
        sums = np.cumsum(stated[order].astype(np.float64))
        return float(own[order[min(int(np.searchsorted(sums, float(self.recall) * sums[-1])), len(order) - 1)]])


def prefer(probabilities: NDArray[np.floating], place: int, threshold: float) -> NDArray[np.int64]:
    """Labels, shape (n,), where one class has a threshold; probabilities have the shape (n, num_classes)."""
    others = probabilities.astype(np.float64)
    others[:, place] = -1.0
    return np.where(probabilities[:, place] >= threshold, place, others.argmax(axis=1))
