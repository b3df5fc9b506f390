"""The table of PriFedSync: its quick version on real digitsand its rows of accounting."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accounting.federated import LocalTraining
from benchmarks.papers.prifedsync import PRINTED, cells
from workers.progress import silent


def test_the_table_holds_the_eighteen_different_mu_that_are_printed() -> None:
    assert len(PRINTED) == 18
    for printed in PRINTED:
        assert f"{printed.training.clt_mu:.2f}" == printed.mu


def test_keys_of_cells_are_unique_and_every_printed_mu_has_one() -> None:
    keys = [cell.key for cell in cells(Path("nowhere"), full=True)]
    assert len(set(keys)) == len(keys)
    assert sum(key.startswith("mu ") for key in keys) == 18


def test_a_row_of_accounting_states_the_limit_and_every_exact_price_beside_the_printed_mu() -> None:
    """Fourth row of table 1, p = 0.5. Weaker batches, fewer rounds and the true neighbours order the prices."""
    cell = next(cell for cell in cells(Path("nowhere"), full=True) if "p 0.5, sigma 1, B 16, R 194" in cell.key)
    rows = cell.run(silent)
    values = {row.method: row.value for row in rows}
    assert values["theorem 2, the limit"] == pytest.approx(3.9156, abs=1e-3)
    exact = values["exact composition of C_p(G)"]
    assert values["exact, Poisson batches, p R rounds taken part in"] < values["exact, Poisson batches"] < exact
    assert exact < values["theorem 2, the limit"] < values["exact, fixed batches, noise sigma * C"]
    assert all(row.reference == "3.92 (paper, as printed)" for row in rows)
    assert all(row.level == "instance" for row in rows)


def test_the_quick_table_trains_on_real_digits(data_root: Path) -> None:
    rows = cells(data_root, full=False)[-1].run(silent)
    personal, shared, _ = (row.value for row in rows)
    assert personal > 90
    assert personal > shared
    for row in rows:
        assert row.epsilon is not None
        assert row.settings["exact_mu"] <= row.settings["as_in_paper_mu"] <= 2.71
        assert row.settings["seeds"] == [0]


def test_the_headline_setting_stays_within_the_printed_mu_by_the_papers_formula_too() -> None:
    cell = LocalTraining(600, 600, 2.74, 1, 40)
    assert cell.clt_mu <= 2.71
