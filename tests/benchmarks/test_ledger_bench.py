"""The ledger's bench runs and keeps its shape; its numbers belong in BENCHMARKS.md.

No ratio of times is asserted: on shared cores it fails for no reason. What it would have found, a second commit or a
scan of the ledger for each reservation, is counted in tests/labeler/ledger/test_ledger_cost.py.
"""

from __future__ import annotations

import json

from benchmarks import run_bench


def test_the_ledger_bench_compares_durable_reservations_with_bare_inserts() -> None:
    document = run_bench("ledger")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    found = {(row["method"], row["metric"]): row["value"] for row in document["rows"]}
    assert found[("bare insert", "commits per second")] > 0
    assert found[("verify the whole chain", "entries per second")] > 0
    assert found[("reserve, 1 account / bare insert", "time ratio")] > 0
