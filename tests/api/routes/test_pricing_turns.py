"""Prices that nobody has asked for before take a processor for seconds, and who only looks waits for none of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.coordinator.estimates import TOTAL, Prices, PricesWait
from api.coordinator.pricing import estimate
from api.limits import TooManyRequests
from api.schema import EstimateView
from labeler.ledger.chain import Head
from labeler.task import Task
from tests.api.routes.conftest import CLASSES, FINGERPRINT, TALLIERS, ConfigOf, ServeIn, Service, eventually

MANY = 6
"""More prices at once than there are threads for prices, and reads at once."""


def have_winners(service: Service) -> None:
    """Its talliers find winners."""
    for name in TALLIERS:
        service.coordinator.stores.parties.contact(
            name, datetime.now(UTC), {"winner_group": "a" * 64}, Head(1, "a" * 64)
        )


def winners(**changes: Any) -> dict[str, Any]:
    task = {
        "name": "dear",
        "method": "ensemble",
        "release": "winner",
        "sigma_votes": 20.0,
        "delta": 1e-5,
        "max_queries": 40,  # a quarter of a second of a core each
        "backbone_fingerprint": FINGERPRINT,
    }
    return task | changes


SIX = 6
LARGEST = 1_000_000
LOOKS = 4
COUNTS = {
    "name": "cheap",
    "classes": list(CLASSES),
    "method": "knn",
    "k": 1,
    "delta": 1e-5,
    "max_queries": 100,
    "backbone_fingerprint": FINGERPRINT,
}


@pytest.mark.parametrize(
    "dear",
    [
        {"max_queries": 5},
        pytest.param({"sigma_votes": None, "epsilon": 2.0, "max_queries": LARGEST}, marks=pytest.mark.long),
    ],
    ids=["held", "real"],
)
def test_six_prices_of_many_winners_keep_nobody_waiting(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, dear: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million, solved for a noise, each took 11.7 s of a processor, and everybody's next price waited for all.

    Small ones are held until the others have looked, so that the order is the same on every machine.
    """
    have_looked = threading.Event()

    def held(task: Task, *others: Any, **more: Any) -> EstimateView:
        found = estimate(task, *others, **more)  # raises among the short prices
        if task.release == "winner":
            have_looked.wait()
        return found

    with serve_in(config_of(tmp_path / "home")) as service:
        if dear["max_queries"] != LARGEST:
            monkeypatch.setattr("api.coordinator.estimates.estimate", held)
            monkeypatch.setattr(service.coordinator.prices, "_wait_s", 240.0)
        have_winners(service)
        waits: list[float] = []

        def attack(number: int) -> int:
            _, secret = service.coordinator.tokens.create(f"viewer {number}", "viewer")
            with service.http(None) as http:
                other = {name: value + number / 100 for name, value in dear.items() if name == "epsilon"}
                task = winners(**({"sigma_votes": 20 + number / 100} | dear | other))
                headers = {"Authorization": f"Bearer {secret}"}
                return http.post("/v1/jobs:estimate", json={"task": task}, headers=headers).status_code

        with ThreadPoolExecutor(SIX) as pool, service.http("requester") as http:
            known = {"task_id": service.task().task_id}
            assert http.post("/v1/jobs:estimate", json=known).status_code == 200
            attacks = [pool.submit(attack, number) for number in range(SIX)]
            eventually(lambda: service.coordinator.prices._slots._held.total() >= SIX - 1)
            for number in range(LOOKS):
                new = COUNTS | {"sigma_votes": 20 + number / 100}
                begun = time.perf_counter()
                assert http.get("/v1/jobs/job-unknown").status_code == 404
                assert http.post("/v1/jobs:estimate", json=known).status_code == 200
                assert http.post("/v1/jobs:estimate", json={"task": new}).status_code == 200
                assert http.post("/v1/tasks", json=new).status_code == 201
                waits.append(time.perf_counter() - begun)
            # By order, since a slow machine takes longer for everything.
            assert sum(one.done() for one in attacks) < SIX - 1, f"others waited for {max(waits):.1f} s"
            have_looked.set()
            assert {one.result() for one in attacks} <= {200, 503}


@pytest.mark.process
def test_a_price_that_is_not_computed_in_time_is_refused_in_words_and_found_by_the_next(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def begins_and_waits() -> bool:
        has_begun.set()
        return may_end.wait()

    with serve_in(config_of(tmp_path / "home")) as service, service.http("requester") as http:
        have_winners(service)
        line = service.coordinator.prices
        monkeypatch.setattr(line, "_wait_s", 240.0)
        made = http.post("/v1/tasks", json=winners(sigma_votes=31.0))
        assert made.status_code == 201
        monkeypatch.setattr(line, "_wait_s", 0.2)
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(line.run_long, "another", begins_and_waits)
            has_begun.wait()
            vectors = {
                "task_id": made.json()["task_id"],
                "features": np.eye(8).tolist() * 4,  # fewer than were priced with the task
                "backbone_fingerprint": FINGERPRINT,
            }
            answers = [
                http.post("/v1/jobs:estimate", json={"task": winners(sigma_votes=32.0)}),
                http.post("/v1/tasks", json=winners(sigma_votes=33.0)),
                http.post("/v1/jobs", json=vectors),
            ]
            may_end.set()
            with pytest.raises(PricesWait):
                held.result()
        assert [answer.status_code for answer in answers] == [503] * 3
        assert {answer.headers["Retry-After"] for answer in answers} == {"10"}
        assert all("was not ready within" in answer.json()["detail"] for answer in answers)
        monkeypatch.setattr(line, "_wait_s", 240.0)
        assert http.post("/v1/jobs:estimate", json={"task": winners(sigma_votes=32.0)}).status_code == 200
        assert http.post("/v1/jobs", json=vectors).status_code == 202


def test_more_long_prices_than_may_wait_are_refused_at_once() -> None:
    line, may_end = Prices(), threading.Event()
    with ThreadPoolExecutor(TOTAL) as pool:
        waiting = [pool.submit(line.run_long, f"token {number}", may_end.wait) for number in range(TOTAL)]
        while line._slots._held.total() < TOTAL:
            time.sleep(0.01)
        with pytest.raises(TooManyRequests, match="15 long prices"):
            line.run_long("one more", may_end.wait)
        may_end.set()
        assert all(one.result() for one in waiting)
    assert line.run_long("one more", may_end.wait)
    line.stop()
