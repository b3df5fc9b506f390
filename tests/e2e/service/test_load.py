"""Many requesters at once: no error, and every label charged exactly once in every journal.

The quick version of `labeler bench service`; how fast it is belongs in BENCHMARKS.md.
"""

from __future__ import annotations

import json

import pytest

from benchmarks import run_bench


@pytest.mark.long
@pytest.mark.slow
def test_fifty_requesters_see_no_error_and_every_label_is_charged_exactly_once() -> None:
    document = run_bench("service")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    rows = {(row["method"], row["metric"]): row for row in document["rows"]}
    for method in ("errors", "charges that do not add up"):
        row = rows[method, "count"]
        assert row["value"] == 0, row["settings"]
    assert rows["jobs completed", "count"]["value"] >= 50
    for kind in ("price", "submit", "status"):
        assert 0 < rows[kind, "p50, milliseconds"]["value"] <= rows[kind, "p99, milliseconds"]["value"]
    assert rows["the service, end to end", "labels per second"]["value"] > 0
    assert rows["run / the service", "throughput ratio"]["value"] > 0
