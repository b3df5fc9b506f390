"""An attack on the real pipeline: can it tell neighbouring data sets apart better than the stated guarantee allows?

The attacker knows everything but whether one record, the canary, is in agent 1's shard, and sees the
release. All questions are copies of one public image next to the canary, so each answer is an
independent trial of a mechanism with squared sensitivity 2: the strongest case there is. It thresholds
the log-likelihood ratio (a difference of two noisy sums) and counts false positives and negatives over
`TRIALS` answers per world. Exact binomial bounds (Clopper, Pearson 1934; each at `1 - FALSE_ALARM / 2`) on
both error rates give a lower bound on mu, since no test of a mu-GDP mechanism beats
beta = Phi(Phi^-1(1 - alpha) - mu) (Dong, Roth, Su 2022), and with it one on epsilon.

With collusion and dropouts the attacker is a colluding agent: it knows its own records and its own noise, and
subtracts both. With as many dropouts as the task allows, what is left is exactly the noise it is charged for.

False alarms: the threshold is fixed beforehand, so a sound pipeline fails this test with probability at most 1e-6.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import beta, norm

import labeler.contribution
from feature_store.quantize import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.batch import QueryBatch
from labeler.budget import Account
from labeler.noise import noise_share
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.release import Release
from labeler.sharing import ShareVector, unshard
from labeler.task import Task, parse_task
from labeler.wellformed import BallotShare
from workers.agent.agent import Agent
from workers.agent.ledger import InMemoryLedger
from workers.studies.one_round import run_round

TRIALS = 20_000
FALSE_ALARM = 1e-6
CLASSES = ("absent", "present")
DIMENSION = 8


def audited_task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "name": "audit",
        "classes": CLASSES,
        "method": "knn",
        "k": 3,
        "sigma_votes": 2.0,
        "delta": 1e-4,
        "max_queries": TRIALS,
        "agents": 2,
        "colluding_agents": 1,
        "backbone_fingerprint": "audit",
    }
    return parse_task(fields | changes)


def shard(path: Path, *, canary: bool, seed: int, label: int = 0) -> Shard:
    """Records of one class somewhere, and maybe one of class 1 exactly where the attacker asks."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(12, DIMENSION))
    labels = np.full(12, label, np.int16)
    if canary:
        features = np.vstack([features, np.eye(1, DIMENSION)])
        labels = np.append(labels, np.int16(1))
    with ShardWriter(path, classes=CLASSES, fingerprint="audit", dimension=DIMENSION, public=False) as writer:
        writer.append(features, labels, [f"record {number}" for number in range(len(labels))])
        writer.finish()
    return Shard.open(path)


def released_scores(task: Task, folder: Path, *, canary: bool, colluder_noise: NDArray[np.float64] | None = None):
    """Run one real round and give the attacker's statistic for each answer."""
    records = [shard(folder / f"a{canary}", canary=canary, seed=1), shard(folder / f"b{canary}", canary=False, seed=2)]
    agents = [
        Agent(
            f"agent-{number}",
            own,
            noise_secret=seeded_source(f"audit {canary} {number}".encode()).bytes(32),
            ledger=InMemoryLedger({"instance": Account(f"agent-{number}", "instance", 10**18)}),
            is_seeded=True,
            engine="numpy",
        )
        for number, own in enumerate(records)
    ]
    batch = QueryBatch(np.repeat(quantize(np.eye(1, DIMENSION)), task.max_queries, axis=0))
    release = run_round(task, batch, agents, post_charge=lambda _: None)
    assert release.noisy_votes is not None
    return release.noisy_votes[:, 1] - release.noisy_votes[:, 0]


def epsilon_lower_bound(
    absent: NDArray[np.float64], present: NDArray[np.float64], threshold: float, delta: float
) -> float:
    """What the attack proves, at confidence 1 - FALSE_ALARM."""
    false_positives, false_negatives = int((absent > threshold).sum()), int((present <= threshold).sum())
    confidence = 1 - FALSE_ALARM / 2
    worst = [beta.ppf(confidence, errors + 1, TRIALS - errors) for errors in (false_positives, false_negatives)]
    mu = norm.ppf(1 - worst[0]) - norm.ppf(worst[1])
    return float(epsilon_of_delta(delta, max(mu, 1e-6)))


def attack(task: Task, folder: Path) -> tuple[float, float]:
    """(epsilon proved by the attack, epsilon stated for one answer)."""
    absent, present = (released_scores(task, folder, canary=canary) for canary in (False, True))
    # Without the canary all 3 neighbours per agent are of class 0: -6; with it -4 is expected. Between the two lies -5.
    stated = price(task, queries=1).instance.epsilon
    return epsilon_lower_bound(absent, present, -5.0, task.delta), stated


@pytest.mark.parametrize("release_noise", ["all agents' noise unknown"])
def test_the_attack_stays_below_the_stated_epsilon(tmp_path: Path, release_noise: str) -> None:
    task = audited_task(colluding_agents=0)
    proved, stated = attack(task, tmp_path)
    assert 0.8 * stated < proved <= stated  # Close from below: the attack is strong enough to mean something.


def test_collusion_is_paid_for_with_more_noise(tmp_path: Path) -> None:
    """The other agent's share is still there, so an outsider proves less than is stated against the colluder."""
    proved, stated = attack(audited_task(colluding_agents=1), tmp_path)
    assert proved < 0.8 * stated


def test_the_attack_catches_the_pipeline_when_its_noise_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labeler.contribution, "noise_share", lambda *args: noise_share(*args) // 2)
    proved, stated = attack(audited_task(colluding_agents=0), tmp_path)
    assert proved > 1.5 * stated


def test_the_attack_catches_noise_that_is_left_out_for_far_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labeler.contribution, "noise_share", lambda *args: noise_share(*args) * 0)
    proved, stated = attack(audited_task(colluding_agents=0), tmp_path)
    assert proved > 2 * stated


def worst_round(task: Task, folder: Path, *, canary: bool) -> tuple[Release, NDArray[np.int64]]:
    """A real round with the largest number of dropouts, and the colluding agent's noise in grid units.

    Of four agents one has dropped out and one colludes; the canary is at one of the two others.
    """
    assert (task.agents, task.colluding_agents, task.max_dropouts) == (4, 1, 1)
    agents = [
        Agent(
            f"agent-{number}",
            shard(folder / f"{canary} {number}", canary=canary and number == 0, seed=number, label=int(number == 2)),
            noise_secret=seeded_source(f"audit {task.release} {canary} {number}".encode()).bytes(32),
            ledger=InMemoryLedger({"instance": Account(f"agent-{number}", "instance", 10**18)}),
            is_seeded=True,
            engine="numpy",
        )
        for number in range(3)
    ]
    batch = QueryBatch(np.repeat(quantize(np.eye(1, DIMENSION)), task.max_queries, axis=0))
    release = run_round(task, batch, agents, post_charge=lambda _: None)
    assert len(release.contributors) == task.quorum == 3
    # Asked again, an agent repeats its answer: so the colluder knows what it put in.
    own = [share.share for share in agents[2].answer(task, batch)]
    apart = [share.noise for share in own if isinstance(share, BallotShare)]
    if task.winner_terms is not None:
        return release, unshard([share.expand() for share in apart], field=task.winner_terms.field)
    together = unshard([share.expand() for share in own if isinstance(share, ShareVector)])
    return release, together - np.int64(task.scale) * agents[2].ballots(task, batch)


def test_the_largest_number_of_dropouts_leaves_the_noise_that_is_charged(tmp_path: Path) -> None:
    """Histogram: the colluder subtracts its votes and its noise, and still proves no more than is stated."""
    task = audited_task(agents=4, colluding_agents=1, max_dropouts=1)
    scores = []
    for canary in (False, True):
        release, noise = worst_round(task, tmp_path, canary=canary)
        assert release.noisy_votes is not None
        left = release.noisy_votes - noise / task.scale - np.array([0, task.k])
        scores.append(left[:, 1] - left[:, 0])
    proved = epsilon_lower_bound(scores[0], scores[1], -5.0, task.delta)
    stated = price(task, queries=1).instance.epsilon
    assert 0.8 * stated < proved <= stated  # Nothing to spare, and nothing missing.


def test_a_colluder_learns_no_more_from_winners_than_is_charged(tmp_path: Path) -> None:
    """Winner: the colluder looks only at answers where its own noise has made the outcome hang on the canary."""
    task = audited_task(agents=4, colluding_agents=1, max_dropouts=1, release="winner")
    errors = []
    for canary in (False, True):
        release, noise = worst_round(task, tmp_path, canary=canary)
        assert release.noisy_votes is None
        # Its three votes and its noise move the balance from -6 (without the canary) or -4 (with it) to -1 or 1.
        balance = task.k + (noise[:, 1] - noise[:, 0]) / task.scale - 5
        chosen = release.labels[np.abs(balance) < 0.5]
        errors.append((int((chosen == (0 if canary else 1)).sum()), len(chosen)))
    confidence = 1 - FALSE_ALARM / 2
    worst = [beta.ppf(confidence, wrong + 1, count - wrong) for wrong, count in errors]
    mu = norm.ppf(1 - worst[0]) - norm.ppf(worst[1])
    proved, stated = float(epsilon_of_delta(task.delta, max(mu, 1e-6))), price(task, queries=1).instance.epsilon
    assert 0.4 * stated < proved <= stated
