"""`import labeler` in a notebook: from folders of real digits to labeled folders, in the calls that people type."""

from __future__ import annotations

import csv
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import labeler
from feature_store import backbones
from feature_store.backbones.spec import is_plain_name
from feature_store.results.image_labels import BUDGET_FIELDS, IMAGE_SCHEMA, stamp_of
from feature_store.results.models import StoredModel
from labeler.errors import InvalidSetting, InvalidTask, MixedShards, NotReady
from labeler.methods import METHODS
from labeler.setting import PLANNED_CLASSES, PLANNED_QUERIES
from labeler.solving import WantedTask
from tests.run_journals import charges_of
from workers.commands.catalog import app, load_commands
from workers.plan import PlanRequest
from workers.run.student import predict_images

ROOT = Path(__file__).parents[3]

CLASSES = ("zero", "one", "two", "three")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites with labeled digits, public ones without labels, and others to test on."""
    root = tmp_path_factory.mktemp("notebook")
    digits = load_digits(n_class=len(CLASSES))
    order = np.random.default_rng(0).permutation(len(digits.target))
    parts = {"site-a": order[:150], "site-b": order[150:300], "scans": order[300:420], "other": order[420:520]}
    for name, rows in parts.items():
        for row in rows:
            folder = root / name / ("" if name == "scans" else CLASSES[digits.target[row]])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (digits.images[row] * 15).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{row:04d}-{CLASSES[digits.target[row]]}.png")
    return root


@pytest.fixture(scope="module")
def job(folders: Path) -> labeler.LabeledJob:
    sites = [
        labeler.embed(folders / name, backbone="pixels:8", classes=CLASSES, quiet=True) for name in ("site-a", "site-b")
    ]
    scans = labeler.embed(folders / "scans", backbone="pixels:8", classes=CLASSES, public=True, quiet=True)
    return labeler.run(sites, scans, folders / "job", epsilon=8.0, delta=1e-4, queries=16, seed=3, quiet=True)


def test_every_public_image_has_a_label_and_most_are_right(job: labeler.LabeledJob) -> None:
    table = job.labels("arrow")
    assert table.num_rows == 120
    assert set(table.column_names) == set(IMAGE_SCHEMA.names)
    right = [name.endswith(f"-{label}.png") for name, label in zip(*_columns(table), strict=True)]
    # 16 clusters at epsilon 8 are about 95 % right; rows of a shard lie in a random order, so clusters differ.
    assert np.mean(right) > 0.75
    assert set(table["origin"].to_pylist()) == {"inferred"}
    assert job.questions("arrow").num_rows == job.report["labels"]["asked"] == 16
    assert 0 <= job.report["images"]["stability"]["low"] <= job.report["images"]["stability"]["high"] <= 1
    assert "epsilon" in job.privacy_card
    assert "sandbox" in job._repr_html_()
    assert "16 of 16 questions answered" in repr(job)


def test_a_job_that_is_run_again_is_the_same_job_and_is_charged_once(job: labeler.LabeledJob, folders: Path) -> None:
    questions, charges = job.questions("arrow"), charges_of(folders / "job")
    sites = [folders / "site-a.shard", folders / "site-b.shard"]
    again = labeler.run(
        sites, folders / "scans.shard", folders / "job", epsilon=8.0, delta=1e-4, queries=16, seed=3, quiet=True
    )
    assert again.questions("arrow")["noisy_votes"].equals(questions["noisy_votes"])
    assert charges_of(folders / "job") == charges
    assert len(dict(charges)) == 1


def test_the_command_without_a_task_file_is_the_same_job_and_says_that_it_is_finished(
    job: labeler.LabeledJob, folders: Path, request: pytest.FixtureRequest
) -> None:
    labeler_command = request.getfixturevalue("labeler")
    shards = [word for part in ("a", "b") for word in ("--shard", folders / f"site-{part}.shard")]
    ask = ("run", *shards, "--images", folders / "scans.shard", "--out", job.path, "--delta", 1e-4, "--seed", 3)
    again = labeler_command(*ask, "--questions", 16, "--epsilon", 8.0)
    assert again.code == 0, again.err
    assert "nobody was asked and nothing was charged" in again.err
    other = labeler_command(*ask, "--questions", 16, "--epsilon", 7.0)
    assert other.code != 0
    assert "another, finished job" in other.err
    unpriced = labeler_command(*ask)
    assert (unpriced.code, "give --epsilon 0.5" in unpriced.err) == (2, True)
    both = labeler_command(*ask, "task.toml", "--epsilon", 8.0)
    assert (both.code, "both say what is asked" in both.err) == (2, True)


def test_public_facts_say_what_part_of_the_price_sites_spend_on_their_offset(job: labeler.LabeledJob) -> None:
    def share(**fields: Any) -> float | None:
        wanted = WantedTask.model_validate({"name": "t", "epsilon": 8.0, "delta": 1e-4} | fields)
        sent = WantedTask.model_validate(wanted.model_dump(exclude_none=True))
        assert sent == wanted
        return sent.settled({"classes": CLASSES, "max_queries": 16}, agents=2).offset_share

    assert job.report["task"]["offset_share"] == share() == 0.05
    assert share(epsilon=0.01) is None
    assert share(offset_share=0) is None
    assert share(offset_share=0.3) == 0.3
    assert share(method="knn") is None
    assert share(epsilon=None, sigma_votes=3.0) is None


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_labels_come_as_a_frame(job: labeler.LabeledJob, frame: Any) -> None:
    library = pytest.importorskip(frame)
    labels = job.labels(frame)
    assert isinstance(labels, library.DataFrame)
    assert labels["label_name"].to_list() == job.labels("arrow")["label_name"].to_pylist()


def test_the_student_labels_other_images_of_the_same_backbone(job: labeler.LabeledJob, folders: Path) -> None:
    other = labeler.embed(folders / "other", backbone="pixels:8", classes=CLASSES, public=True, quiet=True)
    from feature_store.shard import Shard

    truth = np.asarray(Shard.open(other.path).labels)
    assert (job.predict(other) == truth).mean() > 0.75
    smaller = labeler.embed(
        folders / "other", folders / "small.shard", backbone="pixels:4", classes=CLASSES, public=True, quiet=True
    )
    with pytest.raises(MixedShards, match="its labels would mean nothing"):
        job.predict(smaller)


@pytest.mark.process
def test_labelled_images_are_a_data_set_for_a_loader(job: labeler.LabeledJob, folders: Path) -> None:
    from torch.utils.data import DataLoader
    from torchvision.transforms import functional

    data = job.dataset(folders / "scans")
    assert len(data) == 120
    assert data.classes == CLASSES
    data.transform = functional.to_tensor
    pictures, labels = next(iter(DataLoader(data, batch_size=7)))
    assert pictures.shape[0] == 7
    assert labels.tolist() == job.labels("arrow")["label"].to_pylist()[:7]


def test_a_plan_says_what_a_job_costs_before_anything_is_read() -> None:
    plan = labeler.plan(epsilon=0.5, queries=20, agents=3)
    assert plan.epsilon == pytest.approx(0.5, abs=1e-3)
    assert plan.agent_epsilon is None
    assert str(plan).startswith("20 questions: epsilon 0.500 per private image, no bound per agent")
    paid = labeler.plan(sigma=plan.sigma_votes, queries=20, agents=3, offset_share=plan.document["offset_share"])
    assert paid.epsilon == plan.epsilon
    with pytest.raises(InvalidSetting, match="give a price as"):
        labeler.plan()


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_call_takes_a_path_that_can_be_none(path: str) -> None:
    for call in (
        lambda: labeler.embed(path),
        lambda: labeler.embed("scans", path),
        lambda: labeler.run([path], "scans.shard", "job", epsilon=1.0, queries=3),
        lambda: labeler.run([], path, "job", epsilon=1.0),
        lambda: labeler.run([], "scans.shard", path, epsilon=1.0),
        lambda: labeler.plan(sigma=3.0, images=path),
        lambda: labeler.open_job(path),
        lambda: labeler.load_student(path),
        lambda: labeler.connect("https://127.0.0.1:9", "token", ca_file=path),
        lambda: labeler.connect("https://127.0.0.1:9", "token").label("0" * 64, path),
    ):
        with pytest.raises(InvalidSetting, match="must be the path of a file or folder"):
            call()


def test_wrong_fields_and_unfinished_jobs_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match="colour"):
        labeler.run([], tmp_path / "none", tmp_path / "job", epsilon=1.0, colour="red")
    for one in ("site-a.shard", tmp_path / "site-a.shard"):
        with pytest.raises(InvalidSetting, match="shards is a list"):
            labeler.run(one, tmp_path / "none", tmp_path / "job", epsilon=1.0)  # type: ignore[arg-type, unused-ignore]
    with pytest.raises(NotReady, match="no finished job"):
        labeler.open_job(tmp_path)
    with pytest.raises(InvalidSetting, match="say where the shard"):
        labeler.embed("torchvision:CIFAR10?root=here")
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        labeler.colour  # noqa: B018


@pytest.mark.process
def test_naming_the_calls_loads_no_library() -> None:
    looked = (
        "import sys, labeler; labeler.run, labeler.embed, labeler.connect;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'faiss', 'timm', 'scipy', 'sklearn', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0


def _columns(table: Any) -> tuple[list[str], list[str]]:
    return table["source"].to_pylist(), table["label_name"].to_pylist()


@pytest.mark.process
def test_the_package_shows_the_dozen_names_that_people_use() -> None:
    assert dir(labeler) == sorted(labeler.__all__)
    assert len(dir(labeler)) == 12
    assert all(getattr(labeler, name) for name in dir(labeler))
    code = (
        "from labeler.client import Client; import api.client, labeler.client\n"
        "assert labeler.client is api.client and Client is api.client.Client"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_service_is_found_by_what_a_federation_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LABELER_URL", "LABELER_TOKEN", "LABELER_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidSetting, match="set LABELER_URL and LABELER_TOKEN"):
        labeler.connect()
    monkeypatch.setenv("LABELER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("LABELER_TOKEN", "tok_secret")
    with labeler.connect() as service:
        assert repr(service.client) == "Client('http://127.0.0.1:9')"
    # A token that stands beside one address is not sent to another.
    with pytest.raises(InvalidSetting, match="by both"):
        labeler.connect("http://127.0.0.1:8")


@pytest.mark.parametrize("name", PlanRequest.model_fields)
def test_a_field_of_a_plan_is_said_once_for_command_call_and_help(name: str) -> None:
    field = PlanRequest.model_fields[name]
    default = None if field.default_factory else field.default
    assert inspect.signature(labeler.plan).parameters[name].default == default
    assert f"\n    {name}: {field.description}" in (labeler.plan.__doc__ or "")
    options = {one.name: one for one in load_commands(["plan"])["plan"].params}
    if name != "training":  # whose own fields are options
        assert options[name].default == default
        first = " ".join((field.description or "").split()).rstrip(".").split(". ")[0].replace("`", "")
        assert options[name].help.replace("--", "").startswith(first)
    if name in inspect.signature(labeler.run).parameters and name not in ("queries", "images"):
        assert inspect.signature(labeler.run).parameters[name].default == default


def test_words_that_name_a_constant_name_its_value() -> None:
    words = {name: field.description or "" for name, field in PlanRequest.model_fields.items()}
    assert f"Default: 1; {METHODS['knn'].default_k} for knn." in words["k"]
    assert f"Default: {PLANNED_QUERIES};" in words["queries"]
    assert f"or {PLANNED_CLASSES}." in words["classes"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "kn"}, "method: must be one of .*; did you mean 'knn'"),
        ({"agents": "3"}, "agents: a number is needed here, without quotes"),
        ({"accuracy": "0.9", "sigma": None}, "accuracy: a number is needed here"),
        ({"queries": 0}, "queries: must be at least 1"),
        ({"dishonest_talliers": 3}, "dishonest_talliers: must be 1 or 2"),
        ({"ballot_radius": "60"}, "ballot_radius: must be a whole number, or 'auto'"),
    ],
)
def test_a_call_refuses_in_a_sentence_that_names_its_own_argument(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^plan refused: {said}"):
        labeler.plan(**{"sigma": 25.0} | fields)


def test_a_call_with_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="sigmas"):
        labeler.plan(sigmas=3.0)  # type: ignore[call-arg]


DOCUMENT = (Path(__file__).parents[3] / "docs" / "labels.md").read_text()


def test_the_three_lines_of_the_document_label_new_images(
    job: labeler.LabeledJob,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, flags=re.M | re.S)
    assert len(block.split("\n\n", 1)[1].splitlines()) + 1 == 3
    (tmp_path / "job").symlink_to(job.path)
    (tmp_path / "new-scans").symlink_to(folders / "other")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block, names)  # as it stands in the document
    labels = names["labels"]
    assert list(labels.columns) == IMAGE_SCHEMA.names[: -len(BUDGET_FIELDS)]  # type: ignore[attr-defined]
    right = [
        Path(source).parent.name == name for source, name in zip(labels["source"], labels["label_name"], strict=True)
    ]  # type: ignore[index]
    assert len(right) == 100
    assert np.mean(right) > 0.7


def test_predict_writes_the_schema_of_image_labels_and_counts(
    job: labeler.LabeledJob,
    folders: Path,
    tmp_path: Path,
) -> None:
    student = str(job.path / "student.safetensors")
    done = CliRunner().invoke(app, ["predict", student, str(folders / "other"), "--out", str(tmp_path / "new.parquet")])
    assert done.exit_code == 0, done.output
    assert "100 images labeled" in done.stdout
    table = pq.read_table(tmp_path / "new.parquet")
    assert table.schema.names == IMAGE_SCHEMA.names[: -len(BUDGET_FIELDS)], "these images were no job's"
    assert set(table["origin"].to_pylist()) == {"inferred"}
    assert stamp_of(table).privacy["instance"]["epsilon"] == job.report["privacy"]["instance"]["epsilon"]
    assert stamp_of(table).is_seeded, "the job's noise came from a seed, and so it is told"
    done = CliRunner().invoke(
        app, ["predict", student, str(folders / "other"), "--out", str(tmp_path / "new.csv"), "--json"]
    )
    assert json.loads(done.stdout)["images"] == 100
    with (tmp_path / "new.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == table["label_name"].to_pylist()


def test_another_backbone_is_refused_before_an_image_is_read(
    job: labeler.LabeledJob,
    folders: Path,
    tmp_path: Path,
) -> None:
    student = str(job.path / "student.safetensors")
    done = CliRunner().invoke(app, ["predict", student, str(tmp_path), "--backbone", "pixels:7"])
    assert isinstance(done.exception, MixedShards)
    assert "and backbone 'pixels:7' has" in str(done.exception)
    other = labeler.embed(folders / "other", tmp_path / "other.shard", backbone="pixels:7", public=True, quiet=True)
    done = CliRunner().invoke(app, ["predict", student, str(other.path)])
    assert isinstance(done.exception, MixedShards)
    assert "its labels would mean nothing" in str(done.exception)


def test_a_price_at_which_noise_drowns_the_votes_is_told_in_plan_and_run(
    folders: Path,
    tmp_path: Path,
) -> None:
    plan = labeler.plan(epsilon=0.001, delta=1e-4, queries=16, agents=2, classes=4)
    assert "WARNING: the noise drowns the votes" in str(plan)
    assert plan.expected_accuracy is not None
    assert plan.expected_accuracy[1] < 0.7
    assert labeler.plan(epsilon=8.0, delta=1e-4, queries=16, agents=2, classes=4).warning == ""
    document = json.loads(
        CliRunner().invoke(app, ["plan", "--sigma", "4000", "--method", "reverse-knn", "--json"]).stdout
    )
    assert document["warning"]
    assert document["expected_accuracy"]["high"] < 0.5
    sites = [folders / "site-a.shard", folders / "site-b.shard"]
    with pytest.warns(UserWarning, match="the noise drowns the votes"):
        labeler.run(sites, folders / "scans.shard", tmp_path / "job", epsilon=0.001, delta=1e-4, seed=3, quiet=True)


@pytest.mark.parametrize(
    "name", ["timm:hf-hub:somebody/network", "hf-hub:somebody/network", "/srv/network.toml", "../x.pt", "network.toml"]
)
def test_a_models_file_cannot_have_a_path_or_somebodys_repository_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("nothing is loaded that no person has named")

    monkeypatch.setattr(backbones, "load_backbone", load)
    model = StoredModel("prototypes", ("cat", "dog"), {"backbone_fingerprint": "f" * 64}, name, "", {})
    with pytest.raises(InvalidSetting, match="--backbone"):
        predict_images(model, tmp_path)
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["efficientnet-lite0", "pixels:16", "pixels", "timm:mobilenetv3_large_100"])
def test_names_of_published_backbones_are_loaded_by_themselves(name: str) -> None:
    assert is_plain_name(name)
