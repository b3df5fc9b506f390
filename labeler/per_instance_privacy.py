"""The privacy loss of the records that an agent holds: exact, below the price, and only for that agent's eyes.

A price holds for any record that could ever come or go. For a record that is held more can be said: how far the agent's
own votes move when it leaves. That number depends on the agent's other records, so it is private itself.

**Exact, two-sided.** Let D be the agent's records, r one of them, b its ballots of one batch of public questions that
was fixed beforehand, and s_r = |b(D) - b(D - r)|^2. The releases on D and on D - r are the same noise around sums
that differ by b(D) - b(D - r), whatever others vote. For ideal noise both ways of telling them apart are those of
N(0, 1) from N(mu_r, 1), mu_r^2 = s_r / sigma^2, because a Gaussian's shift is symmetric. For integer noise it is the
event of `labeler.accounting.integer` with that squared sensitivity, whose bound holds both ways. No s_r exceeds the
method's. (Per-instance privacy: Wang 2019. PATE's data-dependent bounds differ: one of theirs holds one way only, and
they need all agents' votes without noise, which no party of a federation has.) If records that could be added were
counted, the largest would be the price itself, whatever D is.

**Only the agent sees it, and no sanitized value replaces it.** Let f(D) be the largest of these epsilons, over the
records held. Let U be the output of an (epsilon, delta)-private mechanism instead, with P[U(D) >= f(D)] >= 1 - beta
for every D. To D a record can be added that moves votes as far as any can, giving D' with f(D') = the price. (For knn
that record is nearest to all questions, of another class than those it displaces.) D and D' are neighbors, so

    P[U(D) >= price] >= exp(-epsilon) (P[U(D') >= price] - delta) >= exp(-epsilon) (1 - beta - delta).

((1 - beta) e^-epsilon: 0.89 at epsilon 0.1 and beta 0.01.) Smooth sensitivity does not help: one step from D changes f
by price - f(D), all of its distance to the price. So anybody who may not see the number itself gets the price, which
costs nothing more: the product has no other output for it. `OwnLosses` refuses to be printed, formatted, pickled or
written, and shows itself to its owner alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.integer import epsilon_bound
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.sensitivity import integer_event, summed_votes
from labeler.records import Indexes, Records
from labeler.tally import QueryBatch
from labeler.task import Task

FOR_THE_OWNER = (
    "what a job tells of the records that an agent holds depends on its other records, so it is shown to that agent "
    "alone; everybody else is told the task's price"
)


@dataclass(frozen=True)
class Told:
    """The numbers for the owner. Private: for a terminal at the site, and for no file, log or message.

    Attributes:
        records: that would answer.
        untouched: of them, those whose leaving would change nothing.
        largest_epsilon, median_epsilon: certified, at the task's delta, of the record with the largest loss and of
            the middle one.
        priced_epsilon: of any possible record: the task's price.
    """

    records: int
    untouched: int
    largest_epsilon: float
    median_epsilon: float
    priced_epsilon: float

    def __repr__(self) -> str:
        return "Told(<private>)"


_NOBODY = -1
"""The row of a missing neighbor."""


class OwnLosses:
    """The change of an agent's answers by each of its records; see the module.

    Args:
        owner: the agent's id.
        task: the task; its method counts votes.
        queries: of the batch.
        squared: squared change of all sums when the record leaves, votes, one per record; at least one.

    Raises:
        InvalidSetting: no record, or a change beyond what is priced: then the price or this number is wrong.
    """

    __slots__ = ("_owner", "_queries", "_squared", "_task")

    def __init__(self, owner: str, task: Task, queries: int, squared: NDArray[np.int64]) -> None:
        self._owner, self._task, self._queries = owner, task, queries
        if not len(squared):
            raise InvalidSetting("there is no record of which anything could be told")
        self._squared = sorted(int(one) for one in squared)
        event = summed_votes(task, "instance", queries)
        if event is None or self._squared[-1] * task.scale**2 > event.squared_sensitivity * event.grid_scale**2:
            raise InvalidSetting("a record moves more than the task's price covers; this is a defect of this program")

    def told_to(self, reader: str) -> Told:
        """Show the numbers to the owner.

        Args:
            reader: the agent that will see it.

        Raises:
            PrivacyRefusal: the reader is not the owner.
        """
        if reader != self._owner:
            raise PrivacyRefusal(FOR_THE_OWNER)
        return Told(
            records=len(self._squared),
            untouched=self._squared.count(0),
            largest_epsilon=self._epsilon(self._squared[-1]),
            median_epsilon=self._epsilon(self._squared[len(self._squared) // 2]),
            priced_epsilon=self._epsilon(None),
        )

    def _epsilon(self, squared: int | None) -> float:
        if squared == 0:
            return 0.0
        # The price of winners may be below that of the sums they are read from; it holds for every record.
        price = integer_event(self._task, "instance", self._queries)
        priced = math.inf if price is None else epsilon_bound(price, self._task.delta)
        sums = summed_votes(self._task, "instance", self._queries)
        if squared is None or sums is None:
            return priced
        return min(priced, epsilon_bound(replace(sums, squared_sensitivity=squared), self._task.delta))

    def __repr__(self) -> str:
        return "OwnLosses(<private>)"

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    def __reduce__(self) -> NoReturn:  # copies go this way, too
        raise PrivacyRefusal(FOR_THE_OWNER)


def own_losses(owner: str, task: Task, batch: QueryBatch, records: Records, indexes: Indexes) -> OwnLosses:
    """Return the losses of every record that would answer a batch.

    knn: a record among the first k of a question leaves its place to the next after them. Nothing changes if both are
    of one class, else two counts by one vote; without a next, one count. reverse-knn: its own votes leave, and nothing
    else moves.

    Args:
        task: of method knn or reverse-knn, without caps, ball or votes for life.
        batch: its public questions.
        records: those that would answer.
        indexes: searches them.

    Raises:
        InvalidSetting: another method, or a cap: then a record that leaves lets another in, or moves a model.
    """
    plain = task.records_per_person is None and task.max_agent_records is None and task.ballot_radius is None
    plain = plain and task.attributes_per_record is None
    if not (task.traits.has_k and plain and task.lifetime_budget is None):
        raise InvalidSetting(
            "what single records are told of is computed for knn and reverse-knn without caps, ball, attributes or "
            "votes for life; for other tasks the price is what there is"
        )
    squared = np.zeros(len(records.all_labels) + 1, dtype=np.int64)
    if task.traits.is_reverse:
        squared[:] = min(task.k, len(batch))
    else:
        rows = indexes.of_records(records).search(batch.features, records.neighbors(task.k) + 1).rows
        voting, after = rows[:, :-1], rows[:, -1:]
        # Row _NOBODY is the last one, of no record, and collects the moves of missing neighbors.
        labels = np.append(records.all_labels, np.int16(-1))
        np.add.at(squared, voting, np.where(after == _NOBODY, 1, 2 * (labels[voting] != labels[after])))
    return OwnLosses(owner, task, len(batch), squared[records.rows])
