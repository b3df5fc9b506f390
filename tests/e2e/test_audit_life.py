"""A hundred adaptive jobs aimed at one record each: what they prove stays below what votes for life promise.

The attack is an adversary of `labeler audit` (`LifeAttack`): every canary is an independent trial of the whole game, in
the real voting, journal and noise. Exact binomial bounds on both error rates give a lower bound on mu
(labeler.auditing). A sound filter fails this with probability at most 1e-6.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.audit.adversaries import ADVERSARIES, CANARIES, Surroundings
from checks.audit.run import default_adversaries
from labeler.auditing import Errors, many_runs_mu, promised_mu
from labeler.ledger.lifetimes import LifetimeSpends, Spent
from tests.checks.audit.conftest import audited_task, natural_records

FALSE_ALARM = 1e-6
FOR_LIFE = audited_task(
    method="reverse-knn", k=1, sigma_votes=2.0, lifetime_budget={"budget_nano": 10**9, "least_similarity": 0.9}
)


def proved_mu(folder: Path, canaries: int = CANARIES) -> float:
    features, labels = natural_records()
    around = Surroundings(FOR_LIFE, "instance", features, labels, "release", folder, 0, 1)
    attack = ADVERSARIES["many-jobs"].prepare(around)
    scores = [attack.trial(number, present=bool(number % 2)) for number in range(canaries)]
    wrong = [sum(one > 0 for one in scores[::2]), sum(one <= 0 for one in scores[1::2])]
    return many_runs_mu(Errors(wrong[0], canaries // 2, wrong[1], canaries // 2), 1 - FALSE_ALARM)


@pytest.mark.long
def test_a_hundred_adaptive_jobs_prove_less_than_the_promise_and_not_much_less(tmp_path: Path) -> None:
    promised = promised_mu(FOR_LIFE, "instance")
    assert promised == 1.0
    assert 0.5 * promised < proved_mu(tmp_path) <= promised


@pytest.mark.long
def test_they_prove_more_than_the_promise_where_the_count_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = LifetimeSpends.spent

    def forgotten(self: LifetimeSpends, digests: object, **settings: object) -> Spent:
        found = counted(self, digests, **settings)
        return Spent(found.version, found.spent * 0)

    monkeypatch.setattr(LifetimeSpends, "spent", forgotten)
    monkeypatch.setattr("checks.audit.adversaries.CANARIES", 400)
    assert proved_mu(tmp_path, 400) > 1.1


def test_only_an_adversary_of_many_jobs_attacks_votes_for_life() -> None:
    assert default_adversaries(FOR_LIFE) == ("many-jobs",)
    assert "many-jobs" not in default_adversaries(audited_task())
