"""Prices that nobody has asked for before take a processor for seconds, and who only looks waits for none of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from feature_store.journal.chain import Head
from tests.api.routes.conftest import FINGERPRINT, TALLIERS, ConfigOf, ServeIn, Service

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


def test_who_looks_does_not_wait_for_the_prices_that_another_has_worked_out(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path
) -> None:
    done: list[int] = []
    begun = threading.Semaphore(0)
    with serve_in(config_of(tmp_path / "home")) as service:
        have_winners(service)

        def price(number: int) -> None:
            task = winners(sigma_votes=20 + number / 100)
            with service.http("requester") as http:
                begun.release()
                answer = http.post("/v1/jobs:estimate", json={"task": task})
            assert answer.status_code == 200, answer.text
            done.append(number)

        count = 2 * MANY
        with ThreadPoolExecutor(count) as pool, service.http("admin") as http:
            assert http.get("/healthz").status_code == 200
            asked = [pool.submit(price, number) for number in range(count)]
            for _ in asked:
                begun.acquire()
            wait(asked, return_when=FIRST_COMPLETED)  # the others are waiting by now
            assert http.get("/v1/jobs/job-unknown").status_code == 404
            finished = len(done)
            for one in asked:
                one.result()
        assert finished < count - MANY, "it has waited for others' prices"


SIX = 6
LARGEST = 1_000_000


def test_six_prices_of_a_million_winners_keep_nobody_waiting_and_are_refused_in_words(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path
) -> None:
    """Each took 11.7 s of a processor, and all that others asked waited for the interpreter's lock."""
    with serve_in(config_of(tmp_path / "home")) as service:
        have_winners(service)
        waits: list[float] = []
        answers: list[httpx2.Response] = []

        def ask(number: int) -> None:
            _, secret = service.coordinator.tokens.create(f"viewer {number}", "viewer")
            with service.http(None) as http:
                headers = {"Authorization": f"Bearer {secret}"}
                task = winners(sigma_votes=20 + number / 100, max_queries=LARGEST)
                answers.append(http.post("/v1/jobs:estimate", json={"task": task}, headers=headers))

        with ThreadPoolExecutor(SIX) as pool, service.http("requester") as http:
            assert http.get("/v1/budget").status_code == 200
            known = service.task()
            asked = {"task_id": known.task_id}
            assert http.post("/v1/jobs:estimate", json=asked).status_code == 200
            attack = [pool.submit(ask, number) for number in range(SIX)]
            while not all(one.done() for one in attack) or len(waits) < 20:
                begun = time.perf_counter()
                assert http.get("/v1/jobs/job-unknown").status_code == 404
                assert http.post("/v1/jobs:estimate", json=asked).status_code == 200
                waits.append(time.perf_counter() - begun)
                time.sleep(0.02)
            for one in attack:
                one.result()
    print("longest wait", max(waits), [(a.status_code, a.text[:300]) for a in answers])
    assert max(waits) < 1.0
