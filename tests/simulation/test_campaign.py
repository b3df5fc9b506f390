"""Campaigns: ranges that go on where they stopped, reports that name what replays a seed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labeler.errors import BadData, InvalidSetting, Unavailable
from tests.simulation import campaign
from tests.simulation.bench import rows_of
from tests.simulation.campaign import Report, read_seeds, replay_command, run_seeds
from workers.commands.catalog import app


@pytest.mark.long
def test_a_campaign_goes_on_behind_the_last_chunk(tmp_path: Path) -> None:
    """Each run may begin nothing after no time, so it does a chunk or two."""
    path, seen = tmp_path / "campaign.json", []
    while not seen or seen[-1] < 6:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(campaign, "CHUNK", 2)
            seen.append(run_seeds(0, 6, resume=path, longest_s=0.0).following)
    assert len(seen) > 1
    assert seen == sorted(set(seen))
    kept = json.loads(path.read_bytes())
    assert (kept["first"], kept["last"], kept["following"], kept["found"]) == (0, 6, 6, {})
    assert sum(kept["states"].values()) >= 6


def test_a_file_of_something_else_or_of_another_range_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    kept = {"first": 0, "last": 4, "following": 4, "faults": {}, "states": {}, "found": {}}
    for content, error, said in (
        ({}, BadData, "no file of a campaign"),
        (
            {"version": "labeler-simulation/2"} | kept,
            InvalidSetting,
            "version 2 of .*replayed by the program that wrote it",
        ),
        ({"version": "labeler-simulation/5"} | kept, InvalidSetting, "0:4, and 0:2 were asked for"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(error, match=said):
            run_seeds(0, 2, resume=path)
    assert run_seeds(0, 4, resume=path).schedules == 4


def test_a_range_that_is_none_is_refused() -> None:
    for text in ("", "3", "3:", ":3", "5:5", "6:5", "a:b", "-1:4"):
        with pytest.raises(InvalidSetting, match="seeds are A:B"):
            read_seeds(text)


def test_a_seed_that_was_found_stands_in_the_report_with_what_replays_it() -> None:
    report = Report(5, 9, 9, faults=Counter(killed=3), found={7: "one split: an agent"})
    rows = {row.metric: row for row in rows_of(report)}
    assert rows["rules broken"].value == 1
    assert rows["labeler bench simulate --seeds 7:8 --trace"].method == "one split: an agent"
    assert replay_command(7) in rows


@pytest.mark.process
def test_the_command_shows_one_schedule_step_by_step() -> None:
    shown = CliRunner().invoke(app, ["bench", "simulate", "--seeds", "3:4", "--trace", "--json"])
    assert shown.exit_code == 0
    assert "coordinator starts" in shown.stderr
    assert "calm" in shown.stderr
    metrics = {row["metric"] for row in json.loads(shown.stdout)["rows"]}
    assert {"schedules", "turns", "rules broken"} <= metrics
    several = CliRunner().invoke(app, ["bench", "simulate", "--seeds", "3:5", "--trace"])
    assert isinstance(several.exception, InvalidSetting)


def test_what_a_killed_campaign_has_left_in_memory_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "_IN_MEMORY", tmp_path)
    with campaign.memory_folder() as used:
        held = used.parent
        assert list(tmp_path.iterdir()) == [held]
        shutil.copytree(held, tmp_path / "labeler-schedules-dead")  # its owner is gone
        (tmp_path / "labeler-schedules-new").mkdir()  # and one that is just being made
        (tmp_path / "somebody else's").mkdir()
        with campaign.memory_folder() as other:
            assert {one.name for one in tmp_path.iterdir()} == {
                held.name,
                other.parent.name,
                "labeler-schedules-new",
                "somebody else's",
            }
    assert {one.name for one in tmp_path.iterdir()} == {"labeler-schedules-new", "somebody else's"}


@pytest.mark.long
def test_several_processes_give_the_same_report_and_say_where_one_of_them_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "CHUNK", 2)
    path, alone = tmp_path / "campaign.json", run_seeds(0, 8)
    together = run_seeds(0, 8, resume=path, processes=2)
    for one in (alone, together):
        one.seconds = one.cpu_s = one.elapsed_s = 0.0
    assert together == alone
    killed = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        worker = killed.submit(os.getpid).result()
        monkeypatch.setattr(campaign, "ProcessPoolExecutor", lambda *_, **__: killed)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(Unavailable, match="before seed 8 are counted"):
            run_seeds(8, 10, processes=2)
    finally:
        killed.shutdown()
