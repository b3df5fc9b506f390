"""What an attack proves: lower bounds on a mechanism's privacy loss, at a stated confidence, from what it got wrong.

An attacker guesses whether a canary took part. Under mu-GDP no test has both few false positives and few false
negatives: beta >= Phi(Phi^-1(1 - alpha) - mu) (Dong, Roth, Su 2022). So a test that was too often right refutes mu, and
the largest mu it refutes is a lower bound, with the stated confidence, on every mu for which the promise could hold.

**Many runs** (`many_runs_mu`). Each run is independent and has the canary or has not; the rule of the test was fixed
before. The two numbers of errors are binomial, so their exact upper bounds (Clopper, Pearson 1934; each at half of the
allowed failure) hold together, and mu >= Phi^-1(1 - alpha_upper) - Phi^-1(beta_upper).

**One run** (`one_run_mu`). Of m canaries each takes part by a fair coin u_i of its own; after one run the attacker
guesses exactly g of the coins. Let p_j be the probability that exactly j guesses are right, and F(x) =
Phi(Phi^-1(x) + mu), the largest probability under one neighbour of an event that has probability x under the other.
*For every i, R_i <= F(H_(i-1))* with R_i = sum_(j >= i) (j/m) p_j and H_i = sum_(j >= i) ((g - j)/m) p_j. Proof: draw
one of the m canaries, I, at random, and fix all other coins. Let A be the outcomes in which I is guessed to be b and at
least i - 1 of the other guesses are right. The two data sets u_I = b and u_I = 1 - b are neighbours, so
P[A | u_I = b] <= F(P[A | u_I = 1 - b]). Averaged over I, b and the other coins, the left side is the probability that
I's guess is right and at least i are: R_i; the argument on the right is the probability that it is wrong and at least
i - 1 are right: H_(i-1). F is concave, so by Jensen it may be applied to the average. This needs nothing about how the
canaries meet in the mechanism.
*Then at least c right guesses have probability below tau, if* a distribution with sum_(j >= c) p_j = tau is impossible:
go down from r = tau c/m, h = tau (g - c)/m; at each i < c, h must be at least F^-1(r), for which p_i pays: r grows by
i/(g - i) times what h grows by. All mass above c in c, and no more mass than is needed as late as possible, is what
needs least mass in all: mass higher up makes r larger and h smaller, and of equal mass a later one raises h by more
and r by less. If r + h, which is g/m times all mass, ends above g/m, tau is impossible.
The bound is that of Mahloujifar, Melis and Chaudhuri (ICML 2025, Auditing f-differential privacy in one run) for
mu-GDP; the first of its kind, for (epsilon, delta), is Steinke, Nasr and Jagielski's (NeurIPS 2023).

**What is refuted.** What a ledger is charged is mu^2 of the integer mechanism (`labeler.accounting.integer`), or a pair
whose second part is below any delta (`labeler.accounting.winner`): both errors of any test obey mu's curve up to that
part. So `mu above the charge` is a contradiction to the charge, whatever the mechanism is. The epsilon beside it is
mu's at a delta; `many_runs_epsilon` needs no curve: P(E) <= e^eps Q(E) + delta for the two outcomes of the test.

**Advantage** is the attacker's true positive rate less its false positive rate, which is how much better than a coin it
knows who took part, times two. Under mu-GDP it is at most 2 Phi(mu/2) - 1.

What an audit counted and what follows: facts, and findings that anybody computes again from them.

An audit runs attacks on the real pipeline (`workers.audit`). Its facts are counts; `findings_of` compares what they
prove (`labeler.auditing`) with what the task promises (`labeler.planning`). All findings hold together
with the stated confidence: each attempt has an equal part of the allowed failure.

A finding above the promise means that the pipeline which ran is not what was priced. One far below it means that this
attack is weak, or that the bound is not tight; it does not mean that the promise could be better.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from scipy.special import betaincinv, ndtr, ndtri

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.batching import round_charges
from labeler.errors import BadData, InvalidSetting
from labeler.planning import price
from labeler.setting import StatedLevel
from labeler.task import Task, parse_task

_BISECTIONS: Final = 50
_LARGEST_MU: Final = 64.0


@dataclass(frozen=True)
class Errors:
    """What a test got wrong in independent runs.

    Attributes:
        false_positives, absent: of so many runs without the canary, how many it took for runs with it.
        false_negatives, present: of so many runs with the canary, how many it took for runs without it.

    Raises:
        InvalidSetting: no run of one kind, or more errors than runs.
    """

    false_positives: int
    absent: int
    false_negatives: int
    present: int

    def __post_init__(self) -> None:
        for wrong, runs in ((self.false_positives, self.absent), (self.false_negatives, self.present)):
            if not (runs >= 1 and 0 <= wrong <= runs):
                raise InvalidSetting(f"a test is counted over at least one run of each kind; found {wrong} of {runs}")

    @property
    def advantage(self) -> float:
        """As it was counted, between -1 and 1."""
        return 1 - self.false_positives / self.absent - self.false_negatives / self.present

    def largest_rates(self, confidence: float) -> tuple[float, float]:
        """Upper bounds on both error rates, which hold together with this confidence."""
        each = _check_confidence(confidence) + (1 - confidence) / 2
        return (
            largest_rate(self.false_positives, self.absent, each),
            largest_rate(self.false_negatives, self.present, each),
        )


def largest_rate(errors: int, trials: int, confidence: float) -> float:
    """The exact upper bound on a probability of which `errors` in `trials` were seen (Clopper, Pearson 1934)."""
    _check_confidence(confidence)
    if not (errors >= 0 and trials >= 1):
        raise InvalidSetting(f"a rate is of at least one trial, found {errors} errors in {trials}")
    found = 1.0 if errors >= trials else float(betaincinv(errors + 1, trials - errors, confidence))
    return found if found <= 1 else 1.0  # of a confidence that is no ordinary number there is none: nothing is proved


def many_runs_mu(errors: Errors, confidence: float) -> float:
    """A lower bound on mu from independent runs; 0 where nothing is proved. See the module."""
    alpha, beta = errors.largest_rates(confidence)
    return max(0.0, float(-ndtri(alpha) - ndtri(beta))) if alpha < 1 and beta < 1 else 0.0


def many_runs_epsilon(errors: Errors, delta: float, confidence: float) -> float:
    """A lower bound on epsilon at a delta, whatever kind of mechanism it is; 0 where nothing is proved."""
    if not 0 <= delta < 1:
        raise InvalidSetting(f"delta must be at least 0 and below 1, found {delta}")
    alpha, beta = errors.largest_rates(confidence)
    odds = [(1 - b - delta) / a for a, b in ((alpha, beta), (beta, alpha)) if 1 - b - delta > 0]
    return max([0.0, *(math.log(one) for one in odds)])


def many_runs_advantage(errors: Errors, confidence: float) -> float:
    """A lower bound on the advantage; 0 where nothing is proved."""
    alpha, beta = errors.largest_rates(confidence)
    return max(0.0, 1 - alpha - beta)


def one_run_mu(correct: int, guesses: int, canaries: int, confidence: float) -> float:
    """A lower bound on mu from one run with many canaries; 0 where nothing is proved. See the module.

    Args:
        correct: how many guesses were right.
        guesses: g, how many were made; fixed before the run.
        canaries: m, each of which took part by a fair coin.
        confidence: with which the bound holds.

    Raises:
        InvalidSetting: numbers that no run can have.
    """
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise InvalidSetting(f"of {canaries} canaries {guesses} guesses cannot be right {correct} times")
    tau = 1 - _check_confidence(confidence)
    if not _is_refuted(0.0, correct, guesses, canaries, tau):
        return 0.0
    low, high = 0.0, _LARGEST_MU
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_refuted(middle, correct, guesses, canaries, tau) else (low, middle)
    return low


def largest_advantage(mu: float) -> float:
    """The most that any test's true positive rate lies above its false positive rate under mu-GDP."""
    if not mu >= 0:
        raise InvalidSetting(f"mu must be at least 0, found {mu}")
    return float(2 * ndtr(mu / 2) - 1)


def _is_refuted(mu: float, correct: int, guesses: int, canaries: int, tau: float) -> bool:
    right, wrong = tau * correct / canaries, tau * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        if right + wrong > guesses / canaries:
            return True  # mass above one: no such distribution
        needed = float(ndtr(ndtri(right) - mu))
        if needed > wrong:
            right += i / (guesses - i) * (needed - wrong)
            wrong = needed
    return right + wrong > guesses / canaries


def _check_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InvalidSetting(f"confidence must lie strictly between 0 and 1, found {confidence}")
    return confidence


NANO: Final = 10**9

Count = Annotated[int, Field(ge=0, lt=2**63)]
Words = Annotated[str, Field(max_length=4_000)]


AuditedLevel = StatedLevel
"""Whose presence is attacked."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class _Moving(_Part):
    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What was counted before anybody measured it is written, and signed, as it was.
        return {name: value for name, value in dump(self).items() if value is not None}


class Attempt(_Moving):
    """What one adversary was counted for.

    Attributes:
        adversary, sentence: who.
        absent, present: runs without and with the canary; in one run, canaries that were absent and present.
        false_positives, false_negatives: how many of them it took for the other.
        canaries, guesses, correct: in one run: how many canaries there were, how many of the clearest were guessed,
            and how many of these rightly; 0 in many runs.
        moved_mu: how far the canary moves what is seen, in deviations of the noise in it, measured without noise: no
            test of this attack proves more, and what is promised beyond it is the slack of the bound, or of the attack.
            None where that was not measured.
    """

    adversary: Annotated[str, Field(max_length=200)]
    sentence: Words
    absent: Count
    present: Count
    false_positives: Count
    false_negatives: Count
    canaries: Count = 0
    guesses: Count = 0
    correct: Count = 0
    moved_mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _counts_fit(self) -> Attempt:
        if not (self.false_positives <= self.absent and self.false_negatives <= self.present):
            raise ValueError("an attempt has at most as many errors as runs")
        if self.correct > self.guesses or self.guesses > self.canaries or min(self.absent, self.present) < 1:
            raise ValueError("an attempt has runs of both kinds, and no more right guesses than guesses than canaries")
        return self

    @property
    def errors(self) -> Errors:
        return Errors(self.false_positives, self.absent, self.false_negatives, self.present)


class AuditFacts(_Part):
    """What was audited and counted.

    Attributes:
        task, task_digest: the task, field by field, and its digest.
        level: what a canary is: "instance", "person" or "agent".
        view: what adversaries looked at: "release" or "student".
        confidence: with which all findings hold together.
        seed: of records, questions and coins.
        noise: where it came from.
        attempts: by adversary.
    """

    task: dict[str, Any]
    task_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    level: AuditedLevel
    view: Literal["release", "student"]
    confidence: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    seed: Count
    noise: Words
    attempts: Annotated[tuple[Attempt, ...], Field(min_length=1, max_length=100)]


class Finding(_Moving):
    """What one attempt proves.

    Attributes:
        mu: lower bound on the Gaussian-DP parameter.
        epsilon: of that mu, at the task's delta.
        any_epsilon: lower bound on epsilon that assumes no curve; in one run, that no noise is independent either.
        advantage: as counted: true positive rate less false positive rate.
        advantage_bound: lower bound on it.
        is_above: whether the promise is refuted.
        moved_epsilon: of the attempt's `moved_mu`: the most that this attack could prove with endless runs.
    """

    adversary: Annotated[str, Field(max_length=200)]
    mu: float
    epsilon: float
    any_epsilon: float
    advantage: float
    advantage_bound: float
    is_above: bool
    moved_epsilon: float | None = None


class AuditFindings(_Part):
    """What is promised, and what was proved.

    Attributes:
        promised_mu: square root of what a ledger is charged.
        promised_epsilon, delta: as the price states them.
        promised_advantage: the most that membership may be told apart.
        proved_epsilon: the largest that an attempt proves.
        is_above: whether one refutes the promise.
        findings: by adversary.
    """

    promised_mu: float
    promised_epsilon: float
    delta: float
    promised_advantage: float
    proved_epsilon: float
    is_above: bool
    findings: tuple[Finding, ...]


def read_audit(document: bytes) -> AuditFacts:
    """The facts of `audit.json`; findings are computed again by whoever reads them.

    Raises:
        BadData: it is none.
    """
    try:
        found = json.loads(document)
        return AuditFacts.model_validate_json(json.dumps(found["facts"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadData("this is no audit.json of labeler audit; name the file it wrote") from None


def promised_mu(task: Task, level: StatedLevel) -> float:
    """The Gaussian-DP parameter that the task's whole price stands for.

    Raises:
        InvalidSetting: there is no finite price at the level.
    """
    return _promise(task, level)[0]


def _promise(task: Task, level: StatedLevel) -> tuple[float, float]:
    """(mu, epsilon) of the task's price at the level."""
    statement = next((one for one in price(task).stated if one.level == level), None)
    nano = None if statement is None else statement.charge_nano
    if statement is None or nano is None or not math.isfinite(statement.epsilon):
        raise InvalidSetting(f"the task has no finite price at the {level} level, so there is no promise to audit")
    if task.life is not None and level == "instance":
        nano = task.life.budget_nano  # of all such jobs an image will ever vote in
    elif level != "person":
        nano = max(nano, round_charges(task, task.max_queries)[level])
    return math.sqrt(nano / NANO), statement.epsilon


def findings_of(facts: AuditFacts) -> AuditFindings:
    """What follows from what was counted.

    Raises:
        InvalidTask, InvalidSetting: the task is none, its digest another, or it has no price.
    """
    task = parse_task(facts.task)
    if task.digest != facts.task_digest:
        raise InvalidSetting("the fields of the audited task are not those of its digest")
    mu, epsilon = _promise(task, facts.level)
    each = 1 - (1 - facts.confidence) / len(facts.attempts)
    findings = tuple(_finding(one, mu, task.delta, each) for one in facts.attempts)
    return AuditFindings(
        promised_mu=mu,
        promised_epsilon=epsilon,
        delta=task.delta,
        promised_advantage=largest_advantage(mu),
        proved_epsilon=max(one.epsilon for one in findings),
        is_above=any(one.is_above for one in findings),
        findings=findings,
    )


def _finding(attempt: Attempt, promised: float, delta: float, confidence: float) -> Finding:
    errors = attempt.errors
    if attempt.canaries:
        # Two bounds from the same run: each has half of what may fail.
        half = 1 - (1 - confidence) / 2
        mu = many_runs_mu(errors, half)
        other = one_run_mu(attempt.correct, attempt.guesses, attempt.canaries, half)
        any_epsilon = epsilon_of_delta(delta, other)
        advantage = many_runs_advantage(errors, half)
        is_above = max(mu, other) > promised
    else:
        mu = many_runs_mu(errors, confidence)
        any_epsilon = many_runs_epsilon(errors, delta, confidence)
        advantage = many_runs_advantage(errors, confidence)
        is_above = mu > promised
    moved = attempt.moved_mu
    return Finding(
        adversary=attempt.adversary,
        mu=mu,
        epsilon=epsilon_of_delta(delta, mu),
        any_epsilon=any_epsilon,
        advantage=errors.advantage,
        advantage_bound=advantage,
        is_above=is_above,
        moved_epsilon=None if moved is None else epsilon_of_delta(delta, moved) if moved else 0.0,
    )
