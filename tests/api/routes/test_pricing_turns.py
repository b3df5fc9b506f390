"""Prices that nobody has asked for before take a processor for seconds, and who only looks waits for none of them."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path

from feature_store.journal.chain import Head
from tests.api.routes.conftest import FINGERPRINT, TALLIERS, ConfigOf, ServeIn

MANY = 6
"""More prices at once than there are threads for prices, and reads at once."""


def test_who_looks_does_not_wait_for_the_prices_that_another_has_worked_out(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path
) -> None:
    done: list[int] = []
    begun = threading.Semaphore(0)
    with serve_in(config_of(tmp_path / "home")) as service:
        parties = service.coordinator.stores.parties
        for name in TALLIERS:
            parties.contact(name, datetime.now(UTC), {"winner_group": "a" * 64}, Head(1, "a" * 64))

        def price(number: int) -> None:
            task = {
                "name": "dear",
                "method": "ensemble",
                "release": "winner",
                "sigma_votes": 20 + number / 100,
                "delta": 1e-5,
                "max_queries": 40,  # a quarter of a second of a core each
                "backbone_fingerprint": FINGERPRINT,
            }
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
