"""Votes for life, attacked where they promise: a hundred jobs about the same record, each chosen by the answers before.

Every second job is dear (few votes pay for a budget) and asks about those who seem to be there; the others are cheap
and ask about those who do not. The adversary knows every other record and agent, and the noise of all agents but the
one that it asks about. There are many canaries, each at a place of its own where it asks about it: what a record casts
depends on itself and on its own spend alone, so each is an independent trial of the whole game. The agent's part is
the real one: votes within the budget, spends in a journal, integer noise.

What a record would have cast were it there, the adversary learns from a shadow of its own: the same code over all
canaries. So a filter that forgets to count is found: its shadow forgets as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.journal.database import open_database
from feature_store.journal.lifetimes import LifetimeSpends
from feature_store.quantize import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from feature_store.site_key import SiteKey
from labeler.accounting.events import NANO
from labeler.contribution import contribution
from labeler.errors import InvalidSetting
from labeler.randomness import os_source, seeded_source
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from workers.audit.surroundings import Surroundings
from workers.voting import lifetime_ballots

CANARIES: Final = 2_000
JOBS: Final = 100
DEAR: Final = 5
CHEAP: Final = 20
"""How many votes a budget pays for in a dear job, and in a cheap one."""

_DIMENSION: Final = 64
_LABEL: Final = 1
_NEAR: Final = 0.9
_KEY: Final = SiteKey(b"a" * 32)


class LifeAttack:
    """Games of many canaries each, played when the first of them is asked about (an `adversaries.Attack`)."""

    def __init__(self, around: Surroundings) -> None:
        if around.task.life is None:
            raise InvalidSetting("the attack of many jobs is on votes for life, and the task casts none")
        self._around, self._budget_nano = around, around.task.life.budget_nano
        self._scores: dict[int, NDArray[np.float64]] = {}

    moved_mu: None = None

    def trial(self, number: int, *, present: bool) -> float:
        """See Attack: canaries of odd number are there."""
        game, canary = divmod(number, CANARIES)
        if present != bool(number % 2):
            raise InvalidSetting("of the canaries of a game every second one is there")
        if game not in self._scores:
            self._scores[game] = self._played(game)
        return float(self._scores[game][canary])

    def _played(self, game: int) -> NDArray[np.float64]:
        """The logarithm of the likelihood ratio of a whole history, for each canary."""
        folder = self._around.folder / f"game-{game}"
        folder.mkdir()
        where = quantize(self._around.rng(100 + game).normal(size=(CANARIES, _DIMENSION)))
        there = np.arange(CANARIES) % 2 == 1
        shards = [self._shard(folder / name, where, some) for name, some in (("real", there), ("shadow", there | True))]
        ratio = np.zeros(CANARIES)
        with (
            open_database(folder / "real.db", allow_unsynced=True) as real,
            open_database(folder / "shadow.db", allow_unsynced=True) as shadow,
        ):
            spends = [LifetimeSpends(real), LifetimeSpends(shadow)]
            for number in range(JOBS):
                is_dear = number % 2 == 0
                asked = np.flatnonzero(ratio > 0) if is_dear else np.flatnonzero(ratio <= 0)
                if not len(asked):
                    continue
                task = self._job(number, DEAR if is_dear else CHEAP, len(asked))
                votes = []
                for shard, kept, database in zip(shards, spends, (real, shadow), strict=True):
                    cast, spent = lifetime_ballots(task, QueryBatch(where[asked]), shard, kept.spent)
                    with database.write() as connection:
                        kept.add(f"{number:064}", spent, connection=connection)
                    votes.append(cast)
                seed = self._around.noise_seed
                source = os_source() if seed is None else seeded_source(f"{seed} game {game} {number}".encode())
                seen = contribution(votes[0], task, source=source)[:, _LABEL] / task.scale
                if_there = votes[1][:, _LABEL]
                ratio[asked] += (seen - if_there / 2) * if_there / task.sigma_votes**2
        return ratio

    def _job(self, number: int, votes: int, asked: int) -> Task:
        """A job in which the budget pays for so many votes; the other agent's noise is known."""
        return parse_task(
            {
                "name": f"attack {number}",
                "classes": ("absent", "present"),
                "method": "reverse-knn",
                "sigma_votes": (votes * NANO / self._budget_nano) ** 0.5 * (1 + 1e-5),
                "delta": self._around.task.delta,
                "max_queries": asked,
                "agents": 2,
                "colluding_agents": 1,
                "backbone_fingerprint": "audit",
                "life": {"budget_nano": self._budget_nano, "least_similarity": _NEAR},
            }
        )

    def _shard(self, path: Path, where: NDArray[np.int16], there: NDArray[np.bool_]) -> Shard:
        numbers = np.flatnonzero(there)
        with ShardWriter(
            path,
            classes=("absent", "present"),
            fingerprint="audit",
            dimension=_DIMENSION,
            public=False,
            backbone={"kind": "pixels"},
            site_key=_KEY.name,
            random_bytes=self._around.rng(50).bytes,
        ) as writer:
            digests = _KEY.digests("image", [b"%d" % number for number in numbers])
            labels = np.full(len(numbers), _LABEL, np.int16)
            writer.append(where[numbers], labels, [str(number) for number in numbers], image_digests=digests)
            writer.finish()
        return Shard.open(path)
