"""Votes for life: the filter against simulation, against exact enumeration, and over neighboring sets of records."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import kstest

from labeler.accounting.events import NANO
from labeler.accounting.gaussian import delta_of_epsilon, epsilon_of_delta
from labeler.accounting.integer import epsilon_bound, smoothing_error
from labeler.accounting.lifetime import (
    MOST_UNKNOWN_SHARES,
    ROUND_NANO,
    LifetimeSum,
    lifetime_event,
    may_vote,
    set_aside_nano,
    vote_nano,
)
from labeler.batching import round_charges
from labeler.budget import budget_for
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.planning import price
from labeler.setting import MOST_LIFE_NANO, Life
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.oracles.integers import discrete_gaussian, hockey_stick
from workers.agent.policy import BudgetTable


def task(budget_nano: int = 71_779_539, **changes: object) -> Task:
    life = {"budget_nano": budget_nano, "least_similarity": 0.5}
    fields = {"name": "life", "classes": ["a", "b"], "method": "reverse-knn", "sigma_votes": 10.0, "delta": 1e-5}
    return make_task(**fields | {"max_queries": 20, "colluding_agents": 1, "lifetime_budget": life} | changes)


# The theorem.


def adaptive(xi: NDArray[np.float64], budget: float, *, present: bool) -> NDArray[np.float64]:
    """Log-likelihood ratios of many histories whose next price hangs on all earlier releases, until B is spent."""
    left = np.full(len(xi), budget)
    seen = np.zeros(len(xi))
    ratio = np.zeros(len(xi))
    for step in range(xi.shape[1] - 1):
        # A greedy adversary: asks dearly where what it saw speaks for the record, cheaply where it does not.
        price_now = np.where(seen > 0, 0.4, 0.05) * budget * (1 + (step % 3))
        cast = price_now <= left
        c = np.where(cast, np.sqrt(price_now), 0.0)
        left -= np.where(cast, price_now, 0.0)
        released = xi[:, step] + (c if present else 0.0)
        ratio += c * released - c**2 / 2
        seen += released
    c = np.sqrt(left)
    return ratio + c * (xi[:, -1] + (c if present else 0.0)) - left / 2


@pytest.mark.parametrize("budget", [0.07, 1.0])
def test_the_log_likelihood_of_an_adaptive_history_is_the_one_gaussian_of_its_budget(budget: float) -> None:
    # Two tests, each with a false alarm in a million.
    xi = np.random.default_rng(11).standard_normal((20_000, 13))
    absent = (adaptive(xi, budget, present=False) + budget / 2) / math.sqrt(budget)
    present = (adaptive(xi, budget, present=True) - budget / 2) / math.sqrt(budget)
    assert kstest(absent, "norm").pvalue > 1e-6
    assert kstest(present, "norm").pvalue > 1e-6


@pytest.mark.parametrize("adaptive_choice", [True, False])
def test_every_transcript_of_a_small_integer_filter_stays_under_the_bound(adaptive_choice: bool) -> None:
    """Exact: all transcripts of three rounds, where the noise of the next hangs on the release before."""
    scale, reach = 4, 45
    sigmas = {False: 5.0, True: 9.0}
    # B pays for two votes under the louder noise, so a history under the quieter one ends after one.
    price_of = {loud: Fraction(scale**2) / (Fraction(sigma) ** 2 - 3) for loud, sigma in sigmas.items()}
    budget = 2 * max(price_of.values())
    noise = {loud: discrete_gaussian(sigma, reach) for loud, sigma in sigmas.items()}
    values = np.arange(-reach, reach + scale + 1)

    def law(loud: bool, votes: bool, present: bool) -> NDArray[np.float64]:
        out = np.zeros(len(values))
        start = scale if votes and present else 0
        out[start : start + 2 * reach + 1] = noise[loud]
        return out

    def joint(present: bool) -> NDArray[np.float64]:
        total: list[NDArray[np.float64]] = []
        for high_first in (False, True):
            first = law(False, True, present) * ((values > 0) == high_first)
            loud = high_first if adaptive_choice else True
            left = budget - price_of[False]
            votes = price_of[loud] <= left
            left -= price_of[loud] if votes else 0
            second = law(loud, votes, present)
            third = law(True, price_of[True] <= left, present)
            total.append(np.einsum("i,j,k->ijk", first, second, third).ravel())
        return np.concatenate(total)

    p, q = joint(present=True), joint(present=False)
    mu = math.sqrt(budget)
    error = 3 * smoothing_error()
    for epsilon in (0.1, 0.2, 0.5, 1.0, 2.0):
        for one, other in ((p, q), (q, p)):
            exact = hockey_stick(one, other, epsilon)
            # What lies beyond the reach of 5 sigma is cut off in the enumeration: below 1e-5 of all mass.
            assert exact <= delta_of_epsilon(epsilon - 2 * error, mu) * math.exp(error) + 1e-5
            if epsilon == 0.5:
                assert exact > 0.2 * delta_of_epsilon(epsilon, mu)  # the bound is no empty one


# The rule, over neighboring sets.


def cast(
    ids: list[int],
    jobs: list[tuple[int, float, int]],
    choose: Callable[[NDArray[np.int64]], int],
    budget: int,
) -> tuple[list[NDArray[np.int64]], dict[int, int]]:
    """Ballots of every job, and spends, of records whose places and labels follow from their ids alone."""
    spent = dict.fromkeys(ids, 0)
    ballots: list[NDArray[np.int64]] = []
    for k, nearness, cost in jobs:
        salt = choose(ballots[-1]) if ballots else 0
        places = [np.random.default_rng((one, salt)).permutation(6)[:k] for one in ids]
        near = [np.random.default_rng((one, salt, 1)).random(k) >= nearness for one in ids]
        chosen = np.array([np.where(n, p, -1) for n, p in zip(near, places, strict=True)]).reshape(len(ids), k)
        votes = (chosen >= 0).sum(axis=1)
        life = Life(budget_nano=budget, least_similarity=0.0)
        votes_now = may_vote(np.array([spent[one] for one in ids], dtype=np.int64), votes, price=cost, life=life)
        for one, does, count in zip(ids, votes_now, votes, strict=True):
            spent[one] += int(count) * cost if does else 0
        labels = np.array([one % 3 for one in ids], dtype=np.int64)
        kept = np.where(votes_now[:, None], chosen, -1)
        ballots.append(reverse_knn_ballots(kept, labels, num_queries=6, num_classes=3))
    return ballots, spent


@given(
    ids=st.lists(st.integers(0, 10**6), min_size=1, max_size=8, unique=True),
    jobs=st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1), st.integers(1, 40)), min_size=1, max_size=12),
    budget=st.integers(1, 120),
)
def test_one_record_changes_its_own_votes_and_no_more_than_its_budget_pays_for(
    ids: list[int], jobs: list[tuple[int, float, int]], budget: int
) -> None:
    # What is asked next follows from a release that both worlds saw: here the job's number, the same in both.
    number = iter(range(10**6))
    with_it, spent = cast(ids, jobs, lambda _: next(number) % 7, budget)
    number = iter(range(10**6))
    without, rest = cast(ids[1:], jobs, lambda _: next(number) % 7, budget)
    assert all(spent[one] == rest[one] for one in ids[1:])
    changes = [one - other for one, other in zip(with_it, without, strict=True)]
    assert all(set(np.unique(change)) <= {0, 1} for change in changes)
    assert sum(int((change**2).sum()) * job[2] for change, job in zip(changes, jobs, strict=True)) == spent[ids[0]]
    assert spent[ids[0]] <= budget
    assert sum(int(change.sum()) for change in changes) <= budget


@given(
    spent=st.lists(st.integers(0, 2 * MOST_LIFE_NANO), min_size=1, max_size=20),
    votes=st.integers(0, 10**6),
    price_nano=st.integers(1, 10**18),
    budget=st.integers(1, MOST_LIFE_NANO),
)
def test_who_may_vote_is_the_rule_in_unlimited_integers(
    spent: list[int], votes: int, price_nano: int, budget: int
) -> None:
    life = Life(budget_nano=budget, least_similarity=0.0)
    counts = np.full(len(spent), votes, dtype=np.int64)
    found = may_vote(np.array(spent, dtype=np.int64), counts, price=price_nano, life=life)
    assert found.tolist() == [votes > 0 and one + votes * price_nano <= budget for one in spent]


def test_nothing_is_decided_on_numbers_that_no_journal_holds() -> None:
    life = Life(budget_nano=10, least_similarity=0.0)
    one = np.ones(1, dtype=np.int64)
    for spent, votes, cost in ((-one, one, 1), (one, -one, 1), (one, one, 0)):
        with pytest.raises(PrivacyRefusal, match="at least 0"):
            may_vote(spent, votes, price=cost, life=life)


# The price.


def test_a_task_for_life_costs_its_budget_whatever_is_asked_and_a_round_the_least_there_is() -> None:
    for asked in (task(), task(k=5, max_queries=5000), task(sigma_votes=300.0), task(release="winner", talliers=3)):
        cost = price(asked)
        assert cost.instance.charge_nano == 71_779_539
        exact = epsilon_of_delta(1e-5, math.sqrt(71_779_539 / NANO))
        assert exact <= cost.instance.epsilon <= exact * (1 + 2e-6)
        assert math.isinf(cost.agent.epsilon)
        assert "votes for life" in str(cost.agent.reason)
        assert round_charges(asked, asked.max_queries) == {"instance": ROUND_NANO}


def test_one_vote_costs_its_mu_squared_rounded_up_and_v_is_every_nano_unit() -> None:
    asked = task()
    variance = asked.noise_contributors * Fraction(asked.share_sigma_grid) ** 2
    assert vote_nano(asked) == math.ceil(Fraction(asked.scale) ** 2 / (variance - 3) * NANO)
    event = lifetime_event(asked)
    assert event.mu_squared * NANO == 71_779_539
    assert event.charge_nano == 71_779_539
    assert event.coordinates * event.noise_contributors >= 71_779_539 * MOST_UNKNOWN_SHARES


def test_the_corrections_of_integer_noise_are_in_the_epsilon() -> None:
    # 2 V (tau + 2 kappa) and (1 + e^eps) h V 2^-100 are too small to see in a task's; not with so bad a sampler.
    event = lifetime_event(task())
    exact = epsilon_bound(event, 1e-5)
    assert epsilon_bound(event, 1e-5, total_variation=1e-22) > exact
    assert math.isinf(epsilon_bound(event, 1e-5, total_variation=1e-18))
    # The bulk's bound, which would still hold for a fixed number of coordinates, is not used.
    assert isinstance(event, LifetimeSum)
    assert event.only_plain


def test_a_vote_that_no_life_could_pay_for_is_refused_with_the_noise_that_would_do() -> None:
    with pytest.raises(InvalidSetting, match=r"raise sigma_votes 1\d-fold"):
        price(task(100_000))


def test_what_a_cap_buys_leaves_room_for_a_thousand_rounds() -> None:
    for epsilon in (0.05, 1.0, 3.0):
        cap = budget_for(epsilon, 1e-5)
        budget = set_aside_nano(cap)
        assert budget + 1000 * ROUND_NANO <= cap
        assert budget > 0.99 * cap
    with pytest.raises(InvalidSetting, match="choose a larger epsilon"):
        set_aside_nano(1000)


def test_a_similarity_is_an_exact_inner_product() -> None:
    assert Life(budget_nano=1, least_similarity=0.5).least_product(2048) == 2**21
    tenth = Life(budget_nano=1, least_similarity=0.1).least_product(2048)
    assert tenth - 1 < Fraction(0.1) * 2048**2 <= tenth


def test_no_more_is_set_aside_for_ever_than_a_task_can_promise() -> None:
    """`labeler agent` with life_epsilon = 50 would charge what no task may ever use, and never give it back."""
    most = MOST_LIFE_NANO * 1000 // 999
    assert set_aside_nano(most) <= MOST_LIFE_NANO
    with pytest.raises(InvalidSetting, match="never given back"):
        set_aside_nano(most + 1000)
    with pytest.raises(ValueError, match="never given back"):
        BudgetTable(instance_epsilon=60.0, agent_epsilon="unlimited", delta=1e-5, life_epsilon=50.0)
