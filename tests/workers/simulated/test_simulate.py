"""`labeler simulate`: whoever computes, the same sums; what is done is kept; what cannot be asked is said at once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting
from labeler.methods import METHODS
from workers.commands import simulate as command
from workers.commands.catalogue import app
from workers.simulated import run
from workers.simulated.ballots import SIMULATED
from workers.simulated.federation import digits_pool, shard_pool
from workers.simulated.run import Simulation, exponent, simulate

SMALL = Simulation(agents=(30, 60), k=3, queries=20)


def test_neither_the_number_of_processes_nor_the_engine_changes_a_bit_of_the_sums() -> None:
    pool = digits_pool(seed=3)
    one = simulate(SMALL, pool)["rows"]
    for other in (replace(SMALL, processes=2), replace(SMALL, engine="numpy")):
        found = simulate(other, pool)["rows"]
        assert [row["processes"] for row in found] == [other.processes] * 2
        for name in ("sums_sha256", "labels_right", "sigma_votes", "bytes"):
            assert [row[name] for row in found] == [row[name] for row in one], name
    assert one[0]["sums_sha256"] != simulate(replace(SMALL, agents=(30,), seed=1), pool)["rows"][0]["sums_sha256"]


@pytest.mark.parametrize("method", SIMULATED)
def test_two_hundred_agents_label_digits_at_the_price_that_was_asked_for(method: str) -> None:
    pool = digits_pool(seed=0)
    wanted = Simulation(agents=(200,), method=method, epsilon=20.0, queries=40)  # type: ignore[arg-type]
    (row,) = simulate(wanted, pool)["rows"]
    assert 19.0 < row["epsilon"]["agent"] <= 20.0
    assert row["labels_right"] > 0.5
    assert row["copies_of_a_record"] == pytest.approx(200 * 20 / len(pool.labels))


def test_a_deal_gives_nobody_a_record_twice_and_grows_at_its_end() -> None:
    pool = digits_pool(seed=0)
    small, large = pool.deal(40, records=50, seed=4), pool.deal(100, records=50, seed=4)
    assert np.array_equal(small.places, large.places[:40])
    assert all(len(set(own.tolist())) == 50 for own in large.places)
    first = large.places[: len(pool.labels) // 50]
    assert len(np.unique(first)) == first.size
    with pytest.raises(InvalidSetting, match="none of them twice"):
        pool.deal(1, records=len(pool.labels) + 1, seed=0)


def test_what_is_done_is_kept_and_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, out = digits_pool(seed=0), tmp_path / "scale.json"
    first = simulate(replace(SMALL, agents=(30,)), pool, out=out)
    assert json.loads(out.read_bytes()) == first
    with monkeypatch.context() as patched:
        asked: list[int] = []
        answer = run._answer
        patched.setattr(
            run, "_answer", lambda task, *rest, **more: asked.append(task.agents) or answer(task, *rest, **more)
        )
        both = simulate(SMALL, pool, out=out)
    assert set(asked) == {60}
    assert both["rows"][0] == first["rows"][0]
    with pytest.raises(InvalidSetting, match="other settings"):
        simulate(replace(SMALL, seed=1), digits_pool(seed=1), out=out)
    out.write_text("no JSON")
    with pytest.raises(BadData, match="holds no simulation"):
        simulate(SMALL, pool, out=out)


def test_the_exponent_is_one_where_twice_the_agents_take_twice_as_long() -> None:
    rows = [{"agents": agents, "seconds": 3e-4 * agents} for agents in (1000, 10_000, 100_000)]
    assert exponent(rows) == pytest.approx(1.0)
    assert exponent([row | {"seconds": row["seconds"] ** 2} for row in rows]) == pytest.approx(2.0)
    assert exponent(rows[:1]) is None


def test_a_shard_of_one_s_own_is_dealt_without_what_was_deleted(tmp_path: Path) -> None:
    from benchmarks.speed import write_synthetic_shard

    write_synthetic_shard(tmp_path / "s", records=60, dimension=8, seed=0)
    shard = Shard.open(tmp_path / "s")
    shard.delete(shard.record_ids[:10])
    pool = shard_pool(shard, seed=0)
    assert len(pool.labels) + len(pool.truth) == 50


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--agents many", "--agents takes whole numbers"),
        ("--agents 100,10", "ascending order"),
        ("--agents 0", "at least one agent"),
        ("--method aux-distill", "--method must be one of knn"),
        ("--epsilon 1 --sigma 3", "not both"),
        ("--agents 10 --queries 5000", "719 public images"),
        ("--agents 10 --records 5000", "none of them twice"),
        ("--agents 10 --level person", "--level must be one of"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_the_words_of_who_asked(line: str, said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *line.split()])
    assert result.exit_code
    assert said in f"{result.exception} {result.output}"


def test_the_command_shows_a_table_within_eighty_columns_and_one_document() -> None:
    runner = CliRunner(env={"COLUMNS": "80"})
    shown = runner.invoke(app, ["simulate", "--agents", "20,40", "--queries", "10"])
    assert shown.exit_code == 0
    assert "this protects nobody" in shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    told = json.loads(runner.invoke(app, ["simulate", "--agents", "20", "--queries", "10", "--json"]).stdout)
    assert told["is_seeded"] is True
    assert {"agents", "seconds", "bytes", "peak_mib", "epsilon", "labels_right"} <= set(told["rows"][0])


def test_every_method_but_two_can_be_simulated_and_the_command_names_them() -> None:
    assert set(METHODS) - set(SIMULATED) == {"aux-distill", "federated"}
    assert command.METHODS == SIMULATED


def test_memory_is_the_process_s_own_whatever_its_parent_had() -> None:
    """A parent with 600 MiB starts a simulation; getrusage would tell the parent's."""
    code = (
        "import subprocess, sys; held = bytearray(b'1') * (600 << 20);"
        "sys.exit(subprocess.run([sys.executable, '-c', 'from workers.simulated.run import _peak_kib;"
        "import sys; sys.exit(_peak_kib() > 500 << 10)']).returncode)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_noise_is_not_taken_for_noise_that_was_left_out() -> None:
    with pytest.raises(InvalidSetting, match="sigma_votes: Input should be greater than 0"):
        simulate(replace(SMALL, sigma=0.0, epsilon=None), digits_pool(seed=0))
