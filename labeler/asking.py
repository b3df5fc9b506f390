"""How many questions to ask where records choose theirs: from public facts alone, so that choosing costs nothing.

Asking less makes each count stand out of its noise; asking more tells what lies inside a group of images. With M the
votes that are expected for one class and sigma the whole noise of one count, both known before anybody is asked, what
matters is rho = M / sigma. The rule, for C classes:

    C questions where rho < FEW: only which group is which class can be learnt, and each group must be heard;
    2 C max(1, sqrt(rho / 10)) beyond: noise matters less and less, and groups may be finer,

at most one for FEWEST_IMAGES public images (or C). The price of reverse-knn is the same for any number. M is private:
RECORDS_EACH of an agent are assumed, or what the asker says (labeler.expectation). The constants were chosen on
Office-Caltech10 and CIFAR-10.
"""

from __future__ import annotations

import math
from typing import Final

from labeler.expectation import assumed_records
from labeler.task import Task

FEWEST_IMAGES: Final = 5
"""Public images that a question stands for, at least, in the mean."""

FEW: Final = 7.0
"""rho below which there is one question for each class."""

_TWICE: Final = 10.0


def questions_for(task: Task, *, public_images: int | None = None, records: int | None = None) -> int:
    """How many clusters of public images to ask about.

    Args:
        task: what all parties agree on; its `max_queries` is not read where records choose.
        public_images: how many there are; None where nobody knows yet.
        records: private records of all agents together, as far as anybody may know.
    """
    classes = task.num_classes
    wanted = 2 * classes
    if task.traits.records_choose:
        rho = assumed_records(task, records) * task.k / classes / task.total_sigma_votes
        wanted = classes if rho < FEW else round(2 * classes * max(1.0, math.sqrt(rho / _TWICE)))
    return wanted if public_images is None else min(wanted, max(classes, public_images // FEWEST_IMAGES))
