"""Lower bounds on a mechanism's privacy loss from the errors of an attack, at a stated confidence.

An attacker guesses whether a canary took part. Under mu-GDP no test has both few false positives and few false
negatives: beta >= Phi(Phi^-1(1 - alpha) - mu) (Dong, Roth, Su 2022). So a test that was right too often refutes mu. The
largest mu it refutes is a lower bound, with the stated confidence, on every mu for which the promise could hold.

**Many runs** (`many_runs_mu`). Each run is independent and has the canary or has not; the rule of the test was fixed
before. The two numbers of errors are binomial. So their exact upper bounds (Clopper, Pearson 1934; each at half of the
allowed failure) hold together, and mu >= Phi^-1(1 - alpha_upper) - Phi^-1(beta_upper).

**One run** (`one_run_mu`). Each of m canaries takes part by its own fair coin u_i; after one run the attacker guesses
exactly g of the coins. Let p_j be the probability that exactly j guesses are right. Let F(x) = Phi(Phi^-1(x) + mu): if
an event has probability x under one neighbor, F(x) is its largest probability under the other.
*For every i, R_i <= F(H_(i-1))* with R_i = sum_(j >= i) (j/m) p_j and H_i = sum_(j >= i) ((g - j)/m) p_j. Proof: draw
one of the m canaries, I, at random, and fix all other coins. Let A be the outcomes in which I is guessed to be b and at
least i - 1 of the other guesses are right. The two data sets u_I = b and u_I = 1 - b are neighbors, so
P[A | u_I = b] <= F(P[A | u_I = 1 - b]). Average over I, b and the other coins. The left side is then the probability
that I's guess is right and at least i are: R_i. The argument on the right is the probability that it is wrong and at
least i - 1 are right: H_(i-1). F is concave, so by Jensen it may be applied to the average. This needs nothing about
how the canaries interact in the mechanism.
*Then at least c right guesses have probability below tau, if* a distribution with sum_(j >= c) p_j = tau is impossible.
Go down from r = tau c/m, h = tau (g - c)/m. At each i < c, h must be at least F^-1(r), for which p_i pays: r grows by
i/(g - i) times what h grows by. The least total mass results if all mass above c lies in c and the required mass comes
as late as possible. For mass higher up makes r larger and h smaller, and of equal mass a later one raises h by more
and r by less. If r + h, which is g/m times all mass, ends above g/m, tau is impossible.
The bound is that of Mahloujifar, Melis and Chaudhuri (ICML 2025, Auditing f-differential privacy in one run) for
mu-GDP. The first of its kind, for (epsilon, delta), is Steinke, Nasr and Jagielski's (NeurIPS 2023).

**What is refuted.** A ledger is charged mu^2 of the integer mechanism (`labeler.accounting.integer`), or a pair
whose second part is below any delta (`labeler.accounting.winner`): both errors of any test obey mu's curve up to that
part. So `mu above the charge` contradicts the charge, whatever the mechanism is. The stated epsilon is mu's at a delta.
`many_runs_epsilon` needs no curve: P(E) <= e^eps Q(E) + delta for the two outcomes of the test.

**Advantage** is the attacker's true positive rate minus its false positive rate. It is twice the attacker's gain over a
coin in telling which canaries took part. Under mu-GDP it is at most 2 Phi(mu/2) - 1.

**Facts and findings.** An audit runs attacks on the real pipeline (`checks.audit`). Its facts are counts, and anybody
can compute the findings from them. `findings_of` compares what the counts prove (`labeler.auditing`) with what the task
promises (`labeler.planning`). All findings hold together with the stated confidence: each attempt has an equal part of
the allowed failure.

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
from labeler.errors import BadData, InvalidSetting, PrivacyRefusal
from labeler.planning import price
from labeler.setting import StatedLevel
from labeler.task import Task, parse_task

_BISECTIONS: Final = 50
_LARGEST_MU: Final = 64.0


@dataclass(frozen=True)
class Errors:
    """The errors of a test in independent runs.

    Attributes:
        false_positives, absent: of `absent` runs without the canary, how many it took for runs with it.
        false_negatives, present: of `present` runs with the canary, how many it took for runs without it.

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
        """Return the observed advantage, between -1 and 1."""
        return 1 - self.false_positives / self.absent - self.false_negatives / self.present

    def largest_rates(self, confidence: float) -> tuple[float, float]:
        """Return upper bounds on both error rates, which hold together with this confidence."""
        each = _check_confidence(confidence) + (1 - confidence) / 2
        return (
            largest_rate(self.false_positives, self.absent, each),
            largest_rate(self.false_negatives, self.present, each),
        )


def largest_rate(errors: int, trials: int, confidence: float) -> float:
    """Return the exact upper bound on a probability after `errors` in `trials` (Clopper, Pearson 1934)."""
    _check_confidence(confidence)
    if not (errors >= 0 and trials >= 1):
        raise InvalidSetting(f"a rate is of at least one trial, found {errors} errors in {trials}")
    found = 1.0 if errors >= trials else float(betaincinv(errors + 1, trials - errors, confidence))
    return found if found <= 1 else 1.0  # for an extreme confidence no bound exists: nothing is proved


def many_runs_mu(errors: Errors, confidence: float) -> float:
    """Return a lower bound on mu from independent runs; 0 if nothing is proved. See the module."""
    alpha, beta = errors.largest_rates(confidence)
    return max(0.0, float(-ndtri(alpha) - ndtri(beta))) if alpha < 1 and beta < 1 else 0.0


def many_runs_epsilon(errors: Errors, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon at a delta, for any kind of mechanism; 0 if nothing is proved."""
    if not 0 <= delta < 1:
        raise InvalidSetting(f"delta must be at least 0 and below 1, found {delta}")
    alpha, beta = errors.largest_rates(confidence)
    odds = [(1 - b - delta) / a for a, b in ((alpha, beta), (beta, alpha)) if 1 - b - delta > 0]
    return max([0.0, *(math.log(one) for one in odds)])


def many_runs_advantage(errors: Errors, confidence: float) -> float:
    """Return a lower bound on the advantage; 0 if nothing is proved."""
    alpha, beta = errors.largest_rates(confidence)
    return max(0.0, 1 - alpha - beta)


def one_run_mu(correct: int, guesses: int, canaries: int, confidence: float) -> float:
    """Return a lower bound on mu from one run with many canaries; 0 if nothing is proved. See the module.

    Args:
        correct: number of right guesses.
        guesses: g, number of guesses; fixed before the run.
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
    """Return the largest excess of a test's true positive rate over its false positive rate under mu-GDP."""
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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class _Moving(_Part):
    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Fields that were not measured in older documents are left out, so that these stay as they were signed.
        return {name: value for name, value in dump(self).items() if value is not None}


class Attempt(_Moving):
    """The counts of one adversary.

    Attributes:
        adversary, sentence: its name and description.
        absent, present: runs without and with the canary; in one run, canaries that were absent and present.
        false_positives, false_negatives: how many of them it took for the other.
        canaries, guesses, correct: in one run: the number of canaries, of guesses (the clearest), and of right
            guesses; 0 in many runs.
        moved_mu: how far the canary moves what is seen, in deviations of the noise in it, measured without noise. No
            test of this attack proves more. A promise beyond it is the slack of the bound, or of the attack.
            None if that was not measured.
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
    """The subject and the counts of an audit.

    Attributes:
        task, task_digest: the task, field by field, and its digest.
        level: the kind of canary: "instance", "person" or "agent".
        view: what adversaries looked at: "release" or "student".
        confidence: with which all findings hold together.
        seed: of records, questions and coins.
        noise: its source.
        attempts: by adversary.
    """

    task: dict[str, Any]
    task_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    level: StatedLevel
    view: Literal["release", "student"]
    confidence: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    seed: Count
    noise: Words
    attempts: Annotated[tuple[Attempt, ...], Field(min_length=1, max_length=100)]


class AttemptFinding(_Moving):
    """The bounds that one attempt proves.

    Attributes:
        mu: lower bound on the Gaussian-DP parameter.
        epsilon: of that mu, at the task's delta.
        any_epsilon: lower bound on epsilon that assumes no curve; in one run, not even independent noise.
        advantage: as counted: true positive rate minus false positive rate.
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
    """The promise, and what was proved against it.

    Attributes:
        promised_mu: square root of a ledger's charge.
        promised_epsilon, delta: as the price states them.
        promised_advantage: the largest advantage in telling membership.
        proved_epsilon: the largest that an attempt proves.
        is_above: whether an attempt refutes the promise.
        findings: by adversary.
    """

    promised_mu: float
    promised_epsilon: float
    delta: float
    promised_advantage: float
    proved_epsilon: float
    is_above: bool
    findings: tuple[AttemptFinding, ...]


def read_audit(document: bytes) -> AuditFacts:
    """Return the facts of `audit.json` for a document that leaves; every reader computes the findings again.

    Raises:
        BadData: it is not an audit.
        PrivacyRefusal: its counts are about private records, or it does not say that they are not.
    """
    try:
        found = json.loads(document)
        if found["facts"] and found.get("private") is not False:
            raise PrivacyRefusal(
                "this audit counted private records, or does not say that it did not; its counts stay at the site. Run "
                "labeler audit again without --records, or with a public shard, in an empty folder"
            )
        return AuditFacts.model_validate_json(json.dumps(found["facts"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadData("this is no audit.json of labeler audit; name the file it wrote") from None


def promised_mu(task: Task, level: StatedLevel) -> float:
    """Return the Gaussian-DP parameter of the task's whole price.

    Raises:
        InvalidSetting: there is no finite price at the level.
    """
    return _promise(task, level)[0]


def _promise(task: Task, level: StatedLevel) -> tuple[float, float]:
    """Return (mu, epsilon) of the task's price at the level."""
    statement = next((one for one in price(task).stated if one.level == level), None)
    nano = None if statement is None else statement.charge_nano
    if statement is None or nano is None or not math.isfinite(statement.epsilon):
        raise InvalidSetting(f"the task has no finite price at the {level} level, so there is no promise to audit")
    if task.lifetime_budget is not None and level == "instance":
        nano = task.lifetime_budget.budget_nano  # of all such jobs an image will ever vote in
    elif level != "person":
        nano = max(nano, round_charges(task, task.max_queries)[level])
    return math.sqrt(nano / NANO), statement.epsilon


def findings_of(facts: AuditFacts) -> AuditFindings:
    """Return the findings that follow from the counts.

    Raises:
        InvalidTask, InvalidSetting: the task is invalid, its digest differs, or it has no price.
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


def _finding(attempt: Attempt, promised: float, delta: float, confidence: float) -> AttemptFinding:
    errors, moved = attempt.errors, attempt.moved_mu
    if attempt.canaries:
        # Two bounds from the same run: each has half of the allowed failure.
        confidence = 1 - (1 - confidence) / 2
        other = one_run_mu(attempt.correct, attempt.guesses, attempt.canaries, confidence)
        any_epsilon = epsilon_of_delta(delta, other)
    else:
        other, any_epsilon = 0.0, many_runs_epsilon(errors, delta, confidence)
    mu = many_runs_mu(errors, confidence)
    return AttemptFinding(
        adversary=attempt.adversary,
        mu=mu,
        epsilon=epsilon_of_delta(delta, mu),
        any_epsilon=any_epsilon,
        advantage=errors.advantage,
        advantage_bound=many_runs_advantage(errors, confidence),
        is_above=max(mu, other) > promised,
        moved_epsilon=None if moved is None else epsilon_of_delta(delta, moved) if moved else 0.0,
    )
