"""A measured model's card states the price of a model that was released here, and never one that a file claims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.results.evaluations import evaluation_document, measured_model, released_model
from feature_store.results.models import LINEAR, ReleasedModels, model_file, model_of_bytes
from labeler.errors import BadData
from labeler.methods.evaluate import Scored
from labeler.planning import price
from labeler.privacy_card import card_in_words, dearer_card, guarantee_of, joined_cards, privacy_card
from labeler.task import Task, Training

CLASSES, DIMENSION = ("a", "b"), 6


def card_of(sigma: float) -> dict[str, Any]:
    task = Task(
        name="t", classes=CLASSES, method="blind-average", sigma_votes=sigma, delta=1e-5, max_queries=7, agents=2,
        training=Training(min_records=10, regularisation=0.1), backbone_fingerprint="b",
    )  # fmt: skip
    return privacy_card(task, price(task), is_seeded=False)


def epsilon_of(card: Mapping[str, Any]) -> float:
    return float(card["guarantees"]["instance"]["epsilon"])


WEIGHTS = {"weights": np.random.default_rng(1).normal(size=(DIMENSION + 1, 2))}
OURS = card_of(30.0)
RELEASED = model_file(WEIGHTS, kind=LINEAR, classes=CLASSES, card=OURS, job_id="job-ours")


def evaluated(model: bytes, released: ReleasedModels) -> tuple[dict[str, Any], bytes]:
    """What an evaluation of a file finds, and the measured model."""
    question = Scored(model, (0.6,), "bands").rows(DIMENSION, num_classes=2)
    task = Task(
        name="e", classes=CLASSES, method="evaluate", k=1, sigma_votes=20.0, delta=1e-5, max_queries=len(question),
        agents=2, backbone_fingerprint="b",
    )  # fmt: skip
    votes = np.zeros((len(question), 2))
    votes.flat[:4] = [90.0, 20.0, 200.0, 800.0]
    document = evaluation_document(
        task, question, votes, contributors=2, card=privacy_card(task, price(task), is_seeded=False), job_id="job-e",
        created_at="now", released=released,
    )  # fmt: skip
    return document, measured_model(model, document, released=released)


def resaved(**changes: Any) -> bytes:
    """The released arrays under other metadata."""
    stored = model_of_bytes(RELEASED, name="it")
    about: dict[str, Any] = {"kind": LINEAR, "classes": CLASSES, "card": stored.card, "job_id": stored.job_id}
    return model_file(stored.arrays, **about | changes)


def changed_card(**changes: Any) -> dict[str, Any]:
    card = json.loads(json.dumps(OURS)) | changes
    return dict(card)


def with_epsilon(value: Any) -> dict[str, Any]:
    card = changed_card()
    card["guarantees"]["instance"]["epsilon"] = value
    return card


def test_the_card_of_a_model_that_was_released_here_adds_the_price_of_the_record(tmp_path: Path) -> None:
    released = ReleasedModels(tmp_path / "released")
    released.add(RELEASED)
    document, made = evaluated(RELEASED, released)
    card, alone = model_of_bytes(made, name="it").card, epsilon_of(document["privacy"])
    assert epsilon_of(card) == pytest.approx(epsilon_of(OURS) + alone)
    assert card["delta"] == 2e-5
    assert document["model"]["job_id"] == "job-ours"
    assert "model_claim" not in card


@pytest.mark.parametrize(
    "metadata",
    [
        {"card": with_epsilon(-0.2)},
        {"card": with_epsilon(0.0), "job_id": "job-of-another"},
        {"card": with_epsilon(None), "job_id": ""},
        {"card": changed_card(delta=-1.0, holds="yes", holds_against="nobody")},
        {"job_id": "job-of-another", "backbone": "x", "probe": "AAAA"},
    ],
)
def test_a_released_model_that_was_saved_again_with_another_card_costs_what_the_record_says(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    released = ReleasedModels(tmp_path / "released")
    released.add(RELEASED)
    document, made = evaluated(resaved(**metadata), released)
    honest = model_of_bytes(evaluated(RELEASED, released)[1], name="it")
    stored = model_of_bytes(made, name="it")
    assert stored.card | {"evaluation_task": ""} == honest.card | {"evaluation_task": ""}
    assert (stored.job_id, document["model"]["job_id"]) == ("job-ours", "job-ours")


@pytest.mark.parametrize(
    ("epsilon", "delta", "claim"),
    [
        (3.0, 1e-5, "claims epsilon 3"),
        (-0.2, 1e-5, "states no price"),
        (None, 1e-5, "states no price"),
        ("1", 1e-5, "states no price"),
        (True, 1e-5, "states no price"),
        (10**400, 1e-5, "states no price"),
        (1.0, -1e-5, "states no price"),
        (1.0, 1.0, "states no price"),
        (1.0, None, "states no price"),
        (float("nan"), 1e-5, "states no price"),
        (float("inf"), 1e-5, "states no price"),
        (1.0, float("-inf"), "states no price"),
    ],
)
def test_no_number_of_an_unknown_file_enters_a_price(epsilon: Any, delta: Any, claim: str, tmp_path: Path) -> None:
    """It borrows the id of a job of this service, which proves nothing."""
    released = ReleasedModels(tmp_path / "released")
    released.add(RELEASED)
    weights = WEIGHTS["weights"].copy()
    weights[0, 0] = np.nextafter(weights[0, 0], 1.0)
    card = with_epsilon(0.0) | {"delta": 0.5}
    marked = model_file({"weights": weights}, kind=LINEAR, classes=CLASSES, card=card, job_id="job-ours")
    # NaN and infinity are no JSON, and Python reads them all the same: `model_file` would refuse them.
    text = json.dumps(epsilon), json.dumps(delta)
    header = json.loads(marked[8 : 8 + int.from_bytes(marked[:8], "little")])
    about = header["__metadata__"]["labeler"].replace('"epsilon": 0.0', f'"epsilon": {text[0]}')
    header["__metadata__"]["labeler"] = about.replace('"delta": 0.5', f'"delta": {text[1]}')
    written = json.dumps(header).encode()
    file = len(written).to_bytes(8, "little") + written + marked[8 + int.from_bytes(marked[:8], "little") :]

    document, made = evaluated(file, released)
    stored = model_of_bytes(made, name="it")
    assert stored.card["guarantees"] == document["privacy"]["guarantees"]
    assert stored.card["delta"] == document["privacy"]["delta"] == 1e-5
    assert claim in stored.card["model_claim"]
    assert "nothing proves it" in card_in_words(stored.card)
    assert guarantee_of(stored.card)["model_claim"] == stored.card["model_claim"]
    assert (document["model"]["job_id"], document["model"]["claimed_job_id"]) == ("", "job-ours")
    assert stored.job_id == ""


def test_a_measured_model_that_is_measured_again_states_all_three_prices(tmp_path: Path) -> None:
    released = ReleasedModels(tmp_path / "released")
    released.add(RELEASED)
    document, made = evaluated(RELEASED, released)
    released.add(made)
    card = model_of_bytes(evaluated(made, released)[1], name="it").card
    assert epsilon_of(card) == pytest.approx(epsilon_of(OURS) + 2 * epsilon_of(document["privacy"]))
    # Without the bands that were measured, or with others, the arrays tell what they told.
    for measured in (None, replace(model_of_bytes(made, name="it").measured, stated=((0.6, 0.99),))):  # type: ignore[type-var]
        card = model_of_bytes(evaluated(resaved(measured=measured), released)[1], name="it").card
        assert epsilon_of(card) == pytest.approx(epsilon_of(OURS) + epsilon_of(document["privacy"]))


def test_a_later_file_lowers_no_price_and_a_damaged_record_is_not_taken_for_none(tmp_path: Path) -> None:
    released = ReleasedModels(tmp_path / "released")
    released.add(RELEASED)
    released.add(resaved(card=card_of(1e5)))
    found = released.find(model_of_bytes(RELEASED, name="it"))
    assert found is not None
    assert found[1] == OURS
    [path] = (tmp_path / "released").iterdir()
    path.write_bytes(b"{")
    with pytest.raises(BadData, match="damaged"):
        released.find(model_of_bytes(RELEASED, name="it"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1)])
def test_of_two_jobs_that_released_equal_models_the_dearer_one_says_the_price(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    """Students of the same winners about the same images are equal, whatever their jobs cost."""
    cards = card_of(1e5), OURS
    jobs = [resaved(card=card, job_id=f"job-{number}") for number, card in enumerate(cards)]
    released = ReleasedModels(tmp_path / "released")
    for number in order:
        released.add(jobs[number])
    for job in jobs:
        found = released.find(model_of_bytes(job, name="it"))
        assert found is not None
        assert found == ("job-1", OURS)
        document, made = evaluated(job, released)
        joined = epsilon_of(model_of_bytes(made, name="it").card)
        assert joined == pytest.approx(epsilon_of(OURS) + epsilon_of(document["privacy"]))


def test_a_level_at_which_one_of_two_equal_models_states_no_price_has_none() -> None:
    nothing = changed_card(guarantees={"instance": OURS["guarantees"]["instance"]}, holds=False, colluding_agents=0)
    for card in (dearer_card(OURS, nothing), dearer_card(nothing, OURS)):
        assert {level: one["epsilon"] for level, one in card["guarantees"].items() if level != "instance"} in (
            {}, dict.fromkeys(OURS["guarantees"].keys() - {"instance"})
        )  # fmt: skip
        assert epsilon_of(card) == epsilon_of(OURS)
        assert (card["holds"], card["colluding_agents"]) == (False, 0)


CARDLESS: list[dict[str, Any]] = [{}, *(changed_card(**one) for one in ({"version": "2"}, {"guarantees": []}))]


@pytest.mark.parametrize("card", CARDLESS)
def test_a_file_without_a_card_of_ours_is_refused_before_anything_is_asked(card: dict[str, Any]) -> None:
    with pytest.raises(BadData, match="privacy card"):
        released_model(resaved(card=card), name="it")


def test_a_loss_that_is_none_makes_no_sum() -> None:
    for wrong in (-0.2, float("nan"), float("inf"), None, "3"):
        joined = joined_cards(with_epsilon(wrong), OURS, confidence="c")
        assert joined["guarantees"]["instance"]["epsilon"] is None
