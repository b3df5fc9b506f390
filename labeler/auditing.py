"""What an audit counted and what follows: facts, and findings that anybody computes again from them.

An audit runs attacks on the real pipeline (`workers.audit`). Its facts are counts; `findings_of` compares what they
prove (`labeler.accounting.lower_bounds`) with what the task promises (`labeler.planning`). All findings hold together
with the stated confidence: each attempt has an equal part of the allowed failure.

A finding above the promise means that the pipeline which ran is not what was priced. One far below it means that this
attack is weak, or that the bound is not tight; it does not mean that the promise could be better.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.lower_bounds import (
    Errors,
    largest_advantage,
    many_runs_advantage,
    many_runs_epsilon,
    many_runs_mu,
    one_run_mu,
)
from labeler.batching import round_charges
from labeler.errors import BadData, InvalidSetting
from labeler.planning import price
from labeler.setting import StatedLevel
from labeler.task import Task, parse_task

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
