"""The privacy card: how much a product of a job's releases may have learned of one private record.

It is stored inside every file that leaves, so that every reader finds it, with its assumptions, without asking us.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from labeler.budget import short_epsilon
from labeler.methods import contribution_in_words, unit_in_words
from labeler.methods.sensitivity import sums_means
from labeler.planning import METHOD, Price, finite
from labeler.task import Task

CARD_VERSION = "labeler-privacy-card/1"

_LEVELS = {
    "instance": "one record of one agent is added or removed",
    "person": "all records of one person at one agent are added or removed; at two agents the two mus add",
    "agent": "everything one agent contributes is replaced by nothing",
}


def privacy_card(task: Task, price: Price, *, is_seeded: bool, not_covered: str = "") -> dict[str, Any]:
    """Return the guarantee of a model made from a job's releases to the private records behind it.

    Args:
        task: of the job.
        price: of what was asked.
        is_seeded: whether any noise came from a known seed; then nothing is guaranteed, and the card says so.
        not_covered: private records outside of the guarantee, in a sentence.

    Returns:
        Only JSON types.
    """
    guarantees: dict[str, dict[str, Any]] = {
        statement.level: {
            "epsilon": finite(statement.epsilon),
            "participant_epsilon": finite(statement.participant_epsilon),
            "neighbours": _LEVELS[statement.level],
        }
        | ({} if statement.reason is None else {"reason": statement.reason})
        for statement in price.stated
    }
    if price.group is not None:
        guarantees["group"] = {
            "epsilon": finite(price.group.epsilon),
            "participant_epsilon": finite(price.group.participant_epsilon),
            "neighbours": f"any {price.group_size:,} records of all agents together are added or removed",
            "group_size": price.group_size,
        } | ({} if price.group.reason is None else {"reason": price.group.reason})
    says_what_a_record_moves = task.training is not None and (
        task.training.max_records is not None or task.sampled is not None or sums_means(task)
    )
    return {
        "version": CARD_VERSION,
        "holds": not is_seeded,
        "warning": "simulation: the noise came from a seed, and whoever knows it can subtract it" if is_seeded else "",
        "delta": task.delta,
        "guarantees": guarantees,
        "holds_against": price.holds_against,
        **({"not_covered": not_covered} if not_covered else {}),
        "accounting": METHOD if task.lifetime_budget is None and task.sampled is None else price.instance.method,
        "system": task.traits.system,
        "method": task.method,
        "contribution": contribution_in_words(task),
        "sigma_votes" if unit_in_words(task) == "votes" else "noise_multiplier": task.sigma_votes,
        "agents": task.agents,
        "colluding_agents": task.colluding_agents,
        "max_dropouts": task.max_dropouts,
        **({} if task.dishonest_talliers is None else {"dishonest_talliers": task.dishonest_talliers}),
        **({} if task.records_per_person is None else {"records_per_person": task.records_per_person}),
        # Only if it differs from that of every learner without a kept bound: other cards stay as they always were.
        **({"one_record": price.one_record} if says_what_a_record_moves else {}),
        **({} if task.lifetime_budget is None else {"lifetime_budget": task.lifetime_budget.model_dump(mode="json")}),
        "training": None if task.training is None else task.training.model_dump(mode="json"),
        "backbone_fingerprint": task.backbone_fingerprint,
        "task_digest": task.digest,
    }


def joined_cards(card: Mapping[str, Any], evaluated: Mapping[str, Any], *, confidence: str) -> dict[str, Any]:
    """Return the card of a model whose confidence an evaluation measured: the losses of both, added up.

    Epsilons and deltas add for any two mechanisms (Dwork and Roth 2014, Theorem 3.16), also if the same records
    answered both. A level at which one of the two states nothing has no epsilon. The sum holds only against those
    against whom both hold, and a record is out of it if it is out of one of the two.

    Args:
        card: of the model, from the record of the service that released it, and never from a file that was sent here.
        evaluated: of the evaluation.
        confidence: source of the model's stated confidence, for people.
    """
    levels = {}
    for level, one in card["guarantees"].items():
        other = _of_unit(evaluated, level, one)
        both = {name: _sum(one.get(name), other.get(name)) for name in ("epsilon", "participant_epsilon")}
        reason = one.get("reason") or other.get("reason") or "the evaluation states none"
        levels[level] = dict(one) | both | ({"reason": reason} if both["epsilon"] is None else {})
    against = [card["holds_against"], evaluated["holds_against"]]
    if against[0] != against[1]:
        words = f"Holds only against whom both hold. The model: {against[0]} The evaluation of it: {against[1]}"
        against = [words]
    joined = dict(card)
    if card.get("dishonest_talliers") != evaluated.get("dishonest_talliers"):
        joined.pop("dishonest_talliers", None)
    for outside in ("not_covered", "model_claim"):
        if sentence := card.get(outside) or evaluated.get(outside):
            joined[outside] = sentence
    return joined | {
        "guarantees": levels,
        "holds_against": against[0],
        "colluding_agents": min(card["colluding_agents"], evaluated["colluding_agents"]),
        "delta": card["delta"] + evaluated["delta"],
        "holds": card["holds"] and evaluated["holds"],
        "warning": card["warning"] or evaluated["warning"],
        "confidence": confidence,
        "evaluation_task": evaluated["task_digest"],
    }


def dearer_card(card: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card of what two jobs released alike: that of the dearer one, at no level below the other's price."""
    dear, cheap = sorted((card, other), key=lambda one: _price(one["guarantees"]["instance"]), reverse=True)
    levels = {
        level: max(one, _of_unit(cheap, level, one), key=_price) | {"neighbours": one["neighbours"]}
        for level, one in dear["guarantees"].items()
    }
    return dict(dear) | {
        "guarantees": {level: one for level, one in levels.items() if "epsilon" in one},
        "colluding_agents": min(card["colluding_agents"], other["colluding_agents"]),
        "delta": max(card["delta"], other["delta"]),
        "holds": card["holds"] and other["holds"],
        "warning": dear["warning"] or cheap["warning"],
    }


def _of_unit(card: Mapping[str, Any], level: str, one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the guarantee of a card at the level of another card's guarantee; nothing for groups of other sizes."""
    found: Mapping[str, Any] = card["guarantees"].get(level, {})
    return found if found.get("group_size") == one.get("group_size") else {}


def _price(guarantee: Mapping[str, Any]) -> tuple[float, float]:
    """Return the losses of a level; infinite where nothing is stated."""
    losses = (_loss(guarantee.get(name)) for name in ("epsilon", "participant_epsilon"))
    epsilon, participant = (math.inf if one is None else one for one in losses)
    return epsilon, participant


def _sum(one: Any, other: Any) -> float | None:
    """Return the sum of two losses; None unless both are numbers that a loss can be."""
    return None if _loss(one) is None or _loss(other) is None else one + other


def _loss(value: Any) -> float | None:
    """Return a finite number of at least 0; None for anything else that a stranger's file may hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e300 else None


def card_beside_claim(card: Mapping[str, Any], evaluated: Mapping[str, Any], *, confidence: str) -> dict[str, Any]:
    """Return the card of a measured model of which nobody here knows the price: that of the evaluation alone.

    The model file's statement of its price is added as a claim, in words. No number of it is added to another: people
    who upload a file write into it what they like.

    Args:
        card: of the model's file.
        evaluated, confidence: as for `joined_cards`.

    Raises:
        KeyError, TypeError, AttributeError: the file holds no privacy card.
    """
    if card["version"] != CARD_VERSION:
        raise KeyError(CARD_VERSION)
    epsilon, delta = _loss(card["guarantees"]["instance"].get("epsilon")), _loss(card["delta"])
    claim = "states no price that could hold"
    if epsilon is not None and delta is not None and delta < 1:
        claim = f"claims epsilon {short_epsilon(epsilon, digits=4)} per record at delta {delta:g}"
        if card["holds"] is not True:
            claim += ", under noise from a seed, which protects nobody"
    return dict(evaluated) | {
        "model_claim": f"these numbers are the evaluation's alone; the model's file {claim}, and nothing proves it",
        "confidence": confidence,
        "evaluation_task": evaluated["task_digest"],
    }


def guarantee(price: Price) -> dict[str, Any]:
    """Return the guarantee in a few numbers, independent of any data: for the metadata of a table without a card."""
    levels = [one for one in (price.instance, price.agent, price.person) if one is not None]
    stated: dict[str, Any] = {one.level: {"epsilon": finite(one.epsilon), "method": one.method} for one in levels}
    if "person" in stated:
        stated["person"]["records_per_person"] = price.records_per_person
    if (group := price.group) is not None:
        stated["group"] = {"epsilon": finite(group.epsilon), "method": group.method, "group_size": price.group_size}
    return {
        "delta": price.delta,
        **stated,
        "colluding_agents": price.colluding_agents,
        "holds_against": price.holds_against,
    }


def guarantee_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guarantee of a privacy card in the shape of `guarantee`, for products of the file that carries it.

    Raises:
        KeyError: it is not a privacy card.
    """
    levels = {level: one["epsilon"] for level, one in card["guarantees"].items()}
    stated = {level: {"epsilon": epsilon, "method": card["accounting"]} for level, epsilon in levels.items()}
    if "person" in stated:
        stated["person"]["records_per_person"] = card.get("records_per_person")
    if "group" in stated:
        stated["group"]["group_size"] = card["guarantees"]["group"]["group_size"]
    return {
        "delta": card["delta"],
        **stated,
        "colluding_agents": card["colluding_agents"],
        "holds_against": card["holds_against"],
        **({"model_claim": card["model_claim"]} if "model_claim" in card else {}),
    }


def card_in_words(card: Mapping[str, Any]) -> str:
    """Return a privacy card as Markdown, for people."""
    lines = ["# Privacy card", ""]
    dishonest, most = card.get("dishonest_talliers"), card.get("records_per_person")
    if card["warning"]:
        lines += [f"**This protects nobody:** {card['warning']}.", ""]
    for level, guarantee in card["guarantees"].items():
        epsilon = guarantee["epsilon"]
        reason = guarantee.get("reason", "")
        value = f"none ({reason})" if epsilon is None else f"epsilon {short_epsilon(epsilon, digits=4)}"
        lines.append(f"* {level} level, where {guarantee['neighbours']}: {value}")
    lines += [
        f"* {card['holds_against'].removesuffix('.')}",
        *([f"* {card['not_covered']}"] if "not_covered" in card else []),
        *([f"* {card['model_claim']}"] if "model_claim" in card else []),
        f"* delta: {card['delta']:g}",
        f"* computed by: {card['accounting']}",
        f"* each agent contributed {card['contribution']} ({card['system']}, method {card['method']})",
        f"* {card['agents']} agents, of whom {card['colluding_agents']} may collude, {card['max_dropouts']} drop out",
        *([] if dishonest is None else [f"* the 3 talliers added the noise, of whom {dishonest} may be dishonest"]),
        "* nothing is stated for a person with several records: the task does not bound how many vote"
        if most is None
        else f"* of one person at most {most} records of an agent were used",
        *([f"* {card['one_record']}"] if "one_record" in card else []),
        *([f"* {card['confidence']}"] if "confidence" in card else []),
        f"* task {card['task_digest']}",
    ]
    return "\n".join([*lines, ""])
