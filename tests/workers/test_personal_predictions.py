"""What a home keeps of a shared model, and `labeler agent predict`: private, offline, and no part of any answer."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from feature_store.query_selection import axis_rows, model_rows
from feature_store.results.models import model_file, read_model
from feature_store.shard import Shard
from labeler.budget import NANO
from labeler.errors import InvalidSetting, InvalidTask, NotFound
from labeler.ledger.database import open_database
from labeler.linear_model import model_before, released_model
from labeler.methods.federated import on_grid
from labeler.planning import price
from labeler.privacy_card import privacy_card
from labeler.release import Release, arrays_to_bytes
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from tests.command_line import Labeler
from tests.feature_store.conftest import write_pictures
from tests.labeler.tasks import make_task
from tests.workers.builders import policy_of
from workers.agent import personal
from workers.agent.agent import Agent
from workers.agent.images import ImageFolder
from workers.agent.personal import keep_shared_model, kept_model, predict_at_site
from workers.embedder.shards import embed_features
from workers.homes.journals import backup_home, prune_home
from workers.party.home import AgentConfig, EmbedSettings, create_agent_home, read_agent_config

STEPS, AXES = 6, 3
SAMPLED = {"rate": 0.5, "learning_rate": 2.0}


def task(personal: dict[str, Any] | None, **changes: Any) -> Task:
    training = {"min_records": 5, "regularisation": 1e-3, "iterations": STEPS, "axes": AXES, "sampled": SAMPLED}
    training |= {} if personal is None else {"personal": personal}
    fields = {"method": "federated", "classes": ("ill", "well"), "sigma_votes": 2.0, "delta": 1e-5, "agents": 2}
    return make_task(**fields | {"max_queries": STEPS * (AXES + 1), "training": training} | changes)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An agent's home over forty embedded pictures, dark ones and light ones."""
    scans = write_pictures(tmp_path / "scans", [f"{name}/{n}.png" for name in ("ill", "well") for n in range(20)])
    settings = EmbedSettings(max_records=100, backbone="pixels:4", classes=("ill", "well"))
    config = AgentConfig(
        agent_id="a", coordinator_url="http://127.0.0.1:1", shard="records.shard", images=str(scans), embedding=settings
    )
    create_agent_home(tmp_path / "home", config, policy_of())
    ImageFolder(tmp_path / "home", read_agent_config(tmp_path / "home")).embed()
    return tmp_path / "home"


def asked_at(home: Path, asked: Task, step: int, model: np.ndarray) -> QueryBatch:
    return QueryBatch(axis_rows(Shard.open(home / "records.shard").features[:], AXES), step * asked.rows, model)


def some_releases(asked: Task, count: int) -> list[Release]:
    rng = np.random.default_rng(3)
    shape = (asked.rows, asked.num_classes)
    return [
        Release("histogram", np.zeros(shape[0], np.int16), rng.normal(size=shape) * 3, frozenset("ab"), True)
        for _ in range(count)
    ]


def kept_after_all_steps(home: Path, asked: Task, releases: list[Release]) -> Path:
    for step in range(asked.steps):
        keep_shared_model(home, asked, asked_at(home, asked, step, model_before(asked, releases[:step])))
    return home / "shared-models" / f"{asked.digest}.safetensors"


def test_the_price_is_the_same_to_the_nano_unit_and_a_task_without_the_field_is_as_it_was() -> None:
    without, with_it = task(None), task({"helper": "proximal", "alpha": 0.5})
    assert [one.charge_nano for one in price(without).stated] == [one.charge_nano for one in price(with_it).stated]
    assert price(with_it).instance.charge_nano > NANO // 1000
    assert "personal" not in without.model_dump(mode="json")["training"]
    assert without.digest != with_it.digest
    assert parse_task(with_it.model_dump(mode="json")).digest == with_it.digest
    assert parse_task({**without.model_dump(), "training": without.training}).digest == without.digest
    assert task({}).model_dump(mode="json")["training"]["personal"] == {"helper": "interpolation"}


def test_an_answer_before_its_noise_is_the_same_whatever_the_field_says(home: Path) -> None:
    shard = Shard.open(home / "records.shard")
    agent, model = Agent("a", shard, engine="numpy"), on_grid(np.full((AXES + 1, 2), 0.3))
    # Everybody takes part: coins follow from the digest of the task.
    training = task(None).model_dump()["training"] | {"sampled": SAMPLED | {"rate": 1.0}}
    answers = []
    for field in ({}, {"personal": {}}, {"personal": {"helper": "proximal", "alpha": 0.1}}):
        asked = task(None, training=training | field, backbone_fingerprint=shard.fingerprint)
        answers.append(agent.ballots(asked, asked_at(home, asked, 1, model), bytes(32)))
    assert np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[0], answers[2])
    assert np.abs(answers[0]).max() > 0


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"personal": {}}, "training.personal only means something where training is sampled"),
        ({"sampled": SAMPLED, "personal": {"helper": "identity", "alpha": 0.5}}, "means nothing for helper identity"),
        ({"sampled": SAMPLED, "personal": {"alpha": 1.5}}, "alpha: must be at most 1"),
        ({"sampled": SAMPLED, "personal": {"helper": "attention"}}, "helper: must be"),
    ],
)
def test_what_means_nothing_is_refused_in_a_sentence(training: dict[str, Any], sentence: str) -> None:
    method = "federated" if "sampled" in training else "blind-average"
    with pytest.raises(InvalidTask, match=sentence):
        task(None, method=method, training={"min_records": 5, "regularisation": 0.1, "iterations": STEPS} | training)


def test_a_home_keeps_the_mean_of_the_last_public_models_which_lacks_one_step_of_the_released_one(home: Path) -> None:
    asked = task({})
    releases = some_releases(asked, STEPS)
    path = kept_after_all_steps(home, asked, releases)
    # Steps of which the released model is the mean: 4, 5 and 6. The last one is never asked about.
    theta = [model_before(asked, releases[:step]) for step in range(STEPS + 1)]
    assert np.allclose(read_model(path).arrays["weights"], (theta[4] + theta[5]) / 2)
    released = released_model(asked, releases, asked_at(home, asked, 0, theta[0]).features)
    assert released is not None
    assert np.allclose(released.weights, (theta[4] + theta[5] + theta[6]) / 3)
    # A step that is asked for again, or an earlier one, changes nothing.
    before = path.read_bytes()
    for step in (STEPS - 1, 2):
        keep_shared_model(home, asked, asked_at(home, asked, step, theta[1]))
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert kept_model(home, "t").task_digest == kept_model(home, asked.digest[:8]).task_digest == asked.digest


def test_nothing_is_kept_of_tasks_without_the_field_and_no_more_than_a_few_models_of_those_with_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_grid(np.ones((AXES + 1, 2)))
    keep_shared_model(home, task(None), asked_at(home, task(None), 0, model))
    assert not (home / "shared-models").exists()
    monkeypatch.setattr(personal, "MOST_KEPT", 2)
    for number in range(4):
        asked = task({}, nonce=str(number))
        keep_shared_model(home, asked, asked_at(home, asked, 0, model))
        os.utime(home / "shared-models" / f"{asked.digest}.safetensors", (number, number))
    names = {path.stem for path in (home / "shared-models").iterdir()}
    assert names == {task({}, nonce=str(number)).digest for number in (2, 3)}
    with pytest.raises(NotFound, match="several tasks fit; name one with --task"):
        kept_model(home, None)
    with pytest.raises(NotFound, match="no task here is called 'other'"):
        kept_model(home, "other")


def test_a_full_disk_is_logged_and_leaves_the_model_of_the_step_before(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = task({})
    keep_shared_model(home, asked, asked_at(home, asked, 0, np.zeros((AXES + 1, 2))))
    path = home / "shared-models" / f"{asked.digest}.safetensors"
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(personal, "replace_file", full)
    keep_shared_model(home, asked, asked_at(home, asked, 1, on_grid(np.ones((AXES + 1, 2)))))
    assert "the public model of a step could not be kept" in caplog.text
    assert path.read_bytes() == before


def test_a_damaged_file_is_replaced_at_the_next_step(home: Path) -> None:
    asked = task({})
    (home / "shared-models").mkdir()
    path = home / "shared-models" / f"{asked.digest}.safetensors"
    path.write_bytes(b"half a file")
    model = on_grid(np.ones((AXES + 1, 2)))
    keep_shared_model(home, asked, asked_at(home, asked, 5, model))
    assert np.array_equal(read_model(path).arrays["weights"], model)


@pytest.mark.parametrize("state", ["file", "nowhere", "folder", "other shape", "endless step"])
def test_whatever_lies_in_the_place_of_a_kept_model_no_turn_of_the_agent_fails(
    home: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked, folder = task({}), home / "shared-models"
    path = folder / f"{asked.digest}.safetensors"
    if state == "file":
        folder.write_bytes(b"")
    elif state == "nowhere":
        folder.symlink_to(home / "gone")
    elif state == "folder":
        path.mkdir(parents=True)
    else:
        folder.mkdir()
        card = {"last_step": float("1e999") if state == "endless step" else 3, "averaged": 1, "training": {}}
        weights = np.ones((AXES + 1 + (state == "other shape"), 2))
        about = {"kind": "linear", "classes": ["ill", "well"], "privacy_card": card}
        path.write_bytes(arrays_to_bytes({"weights": weights}, {"labeler": json.dumps(about)}))
    keep_shared_model(home, asked, asked_at(home, asked, 5, on_grid(np.ones((AXES + 1, 2)))))
    if state in ("other shape", "endless step"):
        assert read_model(path).card["last_step"] == 5
    else:
        assert "could not be kept" in caplog.text


def test_a_damaged_file_of_another_task_hides_no_model(home: Path) -> None:
    asked = task({})
    path = kept_after_all_steps(home, asked, some_releases(asked, STEPS))
    path.with_stem("0" * 64).write_bytes(b"half a file")
    for name in (None, asked.digest[:8]):
        assert kept_model(home, name).task_digest == asked.digest
    path.write_bytes(b"half a file")
    with pytest.raises(NotFound, match="has answered no task"):
        kept_model(home, asked.digest[:8])


def test_pruning_a_home_removes_old_shared_models_and_no_backup_holds_them(home: Path, tmp_path: Path) -> None:
    with closing(open_database(home / "journal.db", anchor=home / "journal.head")):
        pass
    old, new = (task({}, nonce=nonce) for nonce in ("old", "new"))
    for asked in (old, new):
        keep_shared_model(home, asked, asked_at(home, asked, 0, np.zeros((AXES + 1, 2))))
    os.utime(home / "shared-models" / f"{old.digest}.safetensors", (1, 1))
    backup_home(home, tmp_path / "copy")
    assert not (tmp_path / "copy" / "shared-models").exists()
    # A folder of a prediction that was killed: features of the site's new images.
    killed, running = (home / f".predict-{name}" for name in ("killed", "running"))
    for folder in (killed, running):
        (folder / "images").mkdir(parents=True)
        (folder / "images" / "features.npy").write_bytes(b"private")
    os.utime(killed, (1, 1))
    done = prune_home(home, timedelta(days=1), dry_run=False)
    assert done["files"] == [".predict-killed", f"{old.digest}.safetensors"]
    assert not killed.exists()
    assert running.exists()
    assert [path.stem for path in (home / "shared-models").iterdir()] == [new.digest]


def released_file(home: Path, asked: Task, releases: list[Release], path: Path, *, backbone: str | None = None) -> Path:
    """A model.safetensors as a requester downloads it."""
    model = released_model(asked, releases, asked_at(home, asked, 0, np.zeros((AXES + 1, 2))).features)
    assert model is not None
    card = privacy_card(asked, price(asked), is_seeded=True)
    path.write_bytes(model_file(model.arrays, kind="linear", classes=asked.classes, card=card, backbone=backbone))
    return path


@pytest.mark.process
def test_a_site_predicts_offline_with_its_kept_model_or_a_released_one(
    home: Path, tmp_path: Path, labeler: Labeler
) -> None:
    own = Shard.open(home / "records.shard")
    asked = task({}, backbone_fingerprint=own.fingerprint)
    releases = some_releases(asked, STEPS)
    kept_after_all_steps(home, asked, releases)
    before = {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}
    scans = tmp_path / "scans"
    result = labeler("agent", "predict", scans, "--home", home, "--json")
    assert result.code == 0, result.err
    out = home / "predictions.parquet"
    assert Path(result.document["out"]) == out
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    table = pq.read_table(out)
    assert table.column_names == ["image", "label", "confidence"]
    assert len(table) == result.document["images"] == 40
    assert sum(result.document["counts"].values()) == 40
    told = json.loads(table.schema.metadata[b"labeler"])["personal"]
    assert "must not leave the site" in told
    assert "must not leave the site" in result.document["stays"]
    assert result.document["accuracy"] is not None
    # Nothing else was written: no model, no thumbnail, and the records and the settings are as they were.
    out.unlink()
    assert {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()} == before

    # A released model in place of the kept one, over the shard of `labeler run`, with alpha 1: the shared labels.
    shared = task({"alpha": 1.0}, backbone_fingerprint=own.fingerprint)
    file = released_file(home, shared, releases, tmp_path / "model.safetensors", backbone="pixels:4")
    mine = tmp_path / "mine.parquet"
    result = labeler(
        "agent", "predict", scans, "--shard", home / "records.shard", "--model", file, "-o", mine, "--json"
    )
    assert result.code == 0, result.err
    assert labeler("predict", file, scans, "--out", tmp_path / "shared.parquet").code == 0
    both = (pq.read_table(path) for path in (mine, tmp_path / "shared.parquet"))
    mine_by, shared_by = (
        dict(zip(one[name].to_pylist(), one[label].to_pylist(), strict=True))
        for one, name, label in zip(both, ("image", "source"), ("label", "label_name"), strict=True)
    )
    assert mine_by == shared_by
    text = labeler("agent", "predict", scans, "--home", home).out
    assert "labels are in" in text
    assert "must not leave the site" in " ".join(text.split())
    assert "alpha" in text


@pytest.mark.process
def test_what_does_not_fit_is_refused_in_a_sentence(home: Path, tmp_path: Path, labeler: Labeler) -> None:
    def refused(*arguments: object) -> str:
        result = labeler("agent", "predict", tmp_path / "scans", *arguments)
        assert result.code != 0
        assert not (home / "predictions.parquet").exists()
        return result.err

    assert "has answered no task with training.personal" in refused("--home", home)
    assert "name the home with --home" in refused("--shard", home / "records.shard")
    own = Shard.open(home / "records.shard")
    other = task({})
    releases = some_releases(other, STEPS)
    kept_after_all_steps(home, other, releases)
    assert "reads features of backbone" in refused("--home", home)
    bare = task(None, backbone_fingerprint=own.fingerprint)
    file = released_file(home, bare, releases, tmp_path / "bare.safetensors", backbone="pixels:4")
    assert "has no training.personal" in refused("--home", home, "--model", file)
    renamed = task({}, backbone_fingerprint=own.fingerprint, classes=("well", "ill"))
    file = released_file(home, renamed, releases, tmp_path / "renamed.safetensors", backbone="pixels:4")
    assert "does not hold private records of the shared model's classes" in refused("--home", home, "--model", file)


@pytest.mark.process
def test_predictions_of_a_personal_model_are_refused_as_a_model_and_as_images(
    home: Path, tmp_path: Path, labeler: Labeler
) -> None:
    own = Shard.open(home / "records.shard")
    asked = task({}, backbone_fingerprint=own.fingerprint)
    kept_after_all_steps(home, asked, some_releases(asked, STEPS))
    assert labeler("agent", "predict", tmp_path / "scans", "--home", home).code == 0
    predictions = home / "predictions.parquet"
    evaluated = labeler(
        "evaluate", predictions, "--shard", home / "records.shard", "--out", tmp_path / "e", "--epsilon", 1
    )
    assert evaluated.code != 0
    assert "predictions.parquet is no model of a job" in evaluated.err
    assert labeler("predict", predictions, tmp_path / "scans").code != 0
    sent = labeler("embed", predictions, "--public", "--backbone", "pixels:4", "--out", tmp_path / "public.shard")
    assert sent.code != 0
    assert not (tmp_path / "public.shard").exists()


def test_a_site_with_features_of_its_own_labels_rows_of_a_file_and_refuses_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    labels = np.arange(40) % 2
    rows = rng.normal(size=(40, 6)) + 3 * np.eye(2, 6)[labels]
    shard = tmp_path / "own.shard"
    embed_features(
        rows, shard, backbone_name="ours", fitted_on="public", probe=rng.normal(size=(64, 6)),
        labels=[("ill", "well")[one] for one in labels], classes=("ill", "well"),
    )  # fmt: skip
    home = tmp_path / "home"
    config = AgentConfig(agent_id="a", coordinator_url="http://127.0.0.1:1", shard=str(shard))
    create_agent_home(home, config, policy_of())
    training = {"min_records": 5, "regularisation": 1e-3, "iterations": 1, "sampled": SAMPLED, "personal": {}}
    fingerprint = Shard.open(shard).fingerprint
    asked = task(None, training=training, max_queries=7, backbone_fingerprint=fingerprint)
    keep_shared_model(home, asked, QueryBatch(model_rows(6), 0, np.zeros((7, 2))))
    np.savez(tmp_path / "new.npz", features=rows, labels=np.array([("ill", "well")[one] for one in labels]))
    found = predict_at_site(str(tmp_path / "new.npz"), home=home)
    assert found.accuracy is not None
    assert found.accuracy > 0.9
    assert found.alpha == 0.0  # nothing was learned together yet
    with pytest.raises(InvalidSetting, match="features that its owner computed"):
        predict_at_site(str(write_pictures(tmp_path / "pictures", ["0.png"])), home=home)


@pytest.mark.skipif(sys.platform != "linux", reason="a priority is a thread's on Linux alone")
def test_predictions_are_made_at_the_least_priority_so_that_answers_stay_on_their_clock(
    home: Path, labeler: Labeler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look(*_args: object, **_options: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise NotFound("seen")

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    monkeypatch.setattr(personal, "predict_at_site", look)
    assert labeler("agent", "predict", home, "--home", home, "--json").code
    assert seen == [19]
    assert os.geteuid() or os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
