"""Private Evolution (Lin et al., ICLR 2024), its generator replaced by what is here: a pool of public images.

Each class keeps a population of candidates. A round: every private record votes for the candidate of its own class
that it is most similar to; the votes are added up and released with noise; counts below a threshold become zero;
the population is drawn anew in proportion to what is left; and a share of the drawn ones are varied. The
generator's variation (a new image like an old one) is here a public image among the `NEAREST` nearest of the
candidate, and the first population is drawn from the public images at random. After the last round class prototypes
are the means of the candidates, weighted with their released counts, less the public mean.

*Price.* In one round a record casts one vote, in one cell of the class's histogram: a vector of `world` of norm 1
whatever the candidates are. Candidates of a round follow from public images and released counts, so T rounds are T
adaptive sums: T times the squared sensitivity of one. The method's own idea, a nearest-neighbour histogram of votes
over public candidates, with one round, the same candidates for every class and centres of clusters as candidates,
is reverse-knn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.data_sets import Split
from benchmarks.rivals.world import Predict, World, noisy_sum, total_sigma, unit

NEAREST = 10
"""A variation is one of so many public images."""


@dataclass(frozen=True)
class Evolution:
    """Iterated candidates; see the module.

    Attributes:
        rounds: T.
        population: candidates of each class.
        threshold: in standard deviations of the noise; counts below it are dropped.
        varied: share of a new population that is replaced by variations.
    """

    rounds: int = 3
    population: int = 10
    threshold: float = 2.0
    varied: float = 0.5

    @property
    def name(self) -> str:
        return "Private Evolution, public pool"

    def fit(self, world: World) -> Predict:
        """Similarities, once; rounds depend on the noise."""
        pool = unit(world.public)
        similar = world.similarities
        around = np.argsort(-(pool @ pool.T), axis=1)[:, : min(NEAREST, len(pool))]
        mean = pool.mean(axis=0)
        seen = unit(world.asked) - mean

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            random = np.random.default_rng([draw, 11])
            population = np.stack(
                [random.choice(len(pool), self.population, replace=False) for _ in range(world.num_classes)]
            )
            counts = np.zeros(population.shape)
            sigma = total_sigma(world, epsilon, dimension=counts.size, releases=self.rounds)
            for turn in range(self.rounds):
                if turn:
                    population = self._next(population, counts, around, random)
                votes = [
                    votes_for(holding, near, population) for holding, near in zip(world.holdings, similar, strict=True)
                ]
                counts = noisy_sum(world, votes, epsilon, draw=draw, releases=self.rounds, opening=turn)
                counts = np.where(counts < self.threshold * sigma, 0.0, counts)
            weights = counts + 1e-9
            prototypes = unit(np.einsum("cp,cpd->cd", weights, pool[population]) / weights.sum(1)[:, None] - mean)
            return np.asarray((seen @ prototypes.T).argmax(axis=1), dtype=np.int64)

        return predict

    def _next(
        self, population: NDArray[np.int64], counts: NDArray[np.float64], around: NDArray[np.int64],
        random: np.random.Generator,
    ) -> NDArray[np.int64]:  # fmt: skip
        drawn = []
        for candidates, count in zip(population, counts, strict=True):
            share = count / count.sum() if count.sum() > 0 else None
            kept = random.choice(candidates, self.population, p=share)
            varied = random.random(self.population) < self.varied
            near = around[kept, random.integers(0, around.shape[1], self.population)]
            drawn.append(np.where(varied, near, kept))
        return np.stack(drawn)


def votes_for(holding: Split, similar: NDArray[np.float32], population: NDArray[np.int64]) -> NDArray[np.float64]:
    """One vote of each record, for the candidate of its class that it is most similar to; shape (C, population)."""
    votes = np.zeros(population.shape)
    for label in range(len(population)):
        rows = similar[holding.labels == label]
        np.add.at(votes[label], rows[:, population[label]].argmax(axis=1), 1.0)
    return votes
