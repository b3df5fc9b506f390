"""What an agent's answers have told of its budgets for nothing: the bound on a search for what is left of them.

A site's bounds are its own: the cap of each account, and a requester's share of it. What was taken of them is no
secret, since the coordinator keeps the same charges. So an answer to a proposal tells one thing of each bound: a yes,
that an amount (what is taken, and the price) is within it; a no, that it is beyond. What has been told of a bound is
an interval: it is no less than what is taken and than the largest amount that was covered, and less than the smallest
that was not.

An answer about an amount outside the interval follows from earlier ones, whoever got those. It is given as often as it
is asked for. One inside is news, and is kept here. It was told

    for a price     a yes, while as much is taken: of what is charged or set aside everybody knows that it was covered
    for nothing     a no; and a yes whose price was given back, while less than its amount is taken

News for nothing is limited in 24 hours: `MOST_OF_ONE` of one name, and `MOST` in all, of each name at most
`MOST_OF_ONE` counted. A proposal that would be news is refused once as many stand above what is taken now. Whether it
is refused follows from what was told and taken before, never from the bound, so that a refusal tells nothing.

**What is learnt in a day.** That amounts are beyond a bound, one name is told of at most `MOST_OF_ONE`, and all of
`MOST`. That amounts are covered is told for nothing while no more than that stand above what is taken. A yes counts
once its price is given back: whoever has n prices set aside at once may learn that n amounts are covered, and is told
nothing new for a day after giving them back. These n are one amount's worth: the largest says it for all.

**Why honest requesters are not refused.** A job of price p is news only if what is taken, and p, is beyond all that was
covered. What was told for nothing and stands above what is taken then lies within p of it. Of jobs of one price that
is one amount, however many are cancelled; of others, some that differ by less than p. And no requester closes a site:
amounts that were covered are covered for all, and one name counts as `MOST_OF_ONE` towards `MOST`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import CheckConstraint, Column, Connection, Index, Text, insert

from feature_store.journal.chain import time_text
from feature_store.journal.columns import WHOLE, Moment
from feature_store.journal.database import Database, strict_table
from feature_store.journal.prepared import Prepared
from feature_store.journal.rules import keep
from labeler.errors import PolicyRefusal

MOST: Final = 100
MOST_OF_ONE: Final = 10
DAY: Final = timedelta(days=1)

told_amounts = strict_table(
    "told_amounts",
    Column("digest", Text, primary_key=True),
    Column("scale", Text, primary_key=True),
    Column("bound", WHOLE, primary_key=True),
    Column("amount", WHOLE, primary_key=True),
    Column("requester", Text, nullable=False),
    Column("told_at", Moment, nullable=False),
    Column("for_nothing", WHOLE, nullable=False),
    CheckConstraint("for_nothing IN (0, 1)", name="for_nothing"),
    CheckConstraint("for_nothing = 1 OR amount <= bound", name="covered"),
    Index(None, "scale", "bound", "amount"),
)
keep(told_amounts, but=("for_nothing",))

_ADD = Prepared(insert(told_amounts))
_COVERED = Prepared("SELECT MAX(amount) FROM told_amounts WHERE scale = :scale AND bound = :bound AND amount <= :bound")
_BEYOND = Prepared("SELECT MIN(amount) FROM told_amounts WHERE scale = :scale AND bound = :bound AND amount > :bound")
_ABOVE = Prepared("""
SELECT requester FROM told_amounts WHERE scale = :scale AND bound = :bound AND amount > :taken
AND told_at >= :since AND for_nothing = 1""")
_GIVE_BACK = Prepared("UPDATE told_amounts SET for_nothing = 1 WHERE digest = :digest AND for_nothing = 0")


@dataclass(frozen=True)
class Compared:
    """One bound of a site, and what an answer would compare with it; nano-units.

    Attributes:
        scale: which bound it is.
        bound: secret.
        taken: what is charged or set aside of it now.
        amount: the same with the price.
    """

    scale: str
    bound: int
    taken: int
    amount: int

    @property
    def is_covered(self) -> bool:
        """Whether the bound allows it."""
        return self.amount <= self.bound

    def __repr__(self) -> str:
        return f"Compared({self.scale!r})"


class ToldAmounts:
    """See the module. Every method joins a transaction."""

    def __init__(self, database: Database) -> None:
        database.create(told_amounts)

    def check(self, asked: Sequence[Compared], requester: str, at: datetime, connection: Connection) -> None:
        """Refuse an answer that would tell more for nothing than a day allows.

        Raises:
            PolicyRefusal: it would.
        """
        for one in asked:
            if not self._is_news(one, connection):
                continue
            found = _ABOVE.all(connection, scale=one.scale, bound=one.bound, taken=one.taken, since=time_text(at - DAY))
            of_each = Counter(name for (name,) in found)
            own, everybody = of_each[requester], sum(min(MOST_OF_ONE, many) for many in of_each.values())
            if own >= MOST_OF_ONE or everybody >= MOST:
                whose, most = ("to one requester", MOST_OF_ONE) if own >= MOST_OF_ONE else ("to all", MOST)
                raise PolicyRefusal(
                    f"the site says {whose} at most {most} times in 24 hours for nothing what its budget covers: by "
                    "declining, or by a yes that leads to no round. Ask for less than was covered before, or tomorrow"
                )

    def note(
        self, digest: str, asked: Sequence[Compared], requester: str, at: datetime, connection: Connection
    ) -> None:
        """Keep what an answer tells that was not known: all of a yes; of a no up to the first bound that does not hold.

        Args:
            digest: of what was answered.
            asked: in the order in which they are looked at.
        """
        is_yes = all(one.is_covered for one in asked)
        for one in asked:
            if self._is_news(one, connection):
                _ADD.run(
                    connection,
                    digest=digest,
                    scale=one.scale,
                    bound=one.bound,
                    amount=one.amount,
                    requester=requester,
                    told_at=time_text(at),
                    for_nothing=int(not is_yes),
                )
            if not one.is_covered:
                return

    def give_back(self, digest: str, connection: Connection) -> None:
        """The price of a yes was given back, or a part of it."""
        _GIVE_BACK.run(connection, digest=digest)

    def _is_news(self, one: Compared, connection: Connection) -> bool:
        (covered,) = _COVERED.first(connection, scale=one.scale, bound=one.bound) or (None,)
        (beyond,) = _BEYOND.first(connection, scale=one.scale, bound=one.bound) or (None,)
        return max(one.taken, covered or 0) < one.amount and (beyond is None or one.amount < beyond)
