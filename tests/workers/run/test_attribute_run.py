"""`labeler run` on images with several labels each: drawn shapes in CelebA's layout, from files to labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from sklearn.metrics import recall_score, roc_auc_score

from checks.audit.run import shard_pool
from feature_store.backbones.backbone import PixelBackbone
from feature_store.embedding import embed_source
from feature_store.results.exports import ExportOrder, export_images
from feature_store.results.image_labels import stamp_of
from feature_store.results.models import read_model
from feature_store.shard import Shard
from feature_store.sources import celeba_source, read_attributes
from feature_store.students.attributes import label_attributes
from labeler.errors import InvalidSetting, InvalidTask, MixedShards, PrivacyRefusal
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.agent.agent import Agent
from workers.notebook.job import LabeledJob
from workers.run.labeling import LabelingJob, run_job
from workers.run.student import predict_images, read_job, score_student
from workers.run.task_file import read_task_file

NAMES = ("filled", "large", "red")
TASK = """
[task]
name = "shapes"
method = "knn"
k = 5
sigma_votes = 1.0
delta = 1e-4
colluding_agents = 0
"""


def draw(folder: Path, *, images: int, seed: int) -> Path:
    """Circles on a dark ground, in CelebA's layout: each is filled or not, large or not, red or green."""
    rng = np.random.default_rng(seed)
    (folder / "img_align_celeba").mkdir(parents=True)
    lines = [str(images), " ".join(NAMES)]
    for number in range(images):
        filled, large, red = rng.integers(0, 2, 3).tolist()
        picture = Image.new("RGB", (24, 24), (10, 10, 10))
        radius = (10 if large else 5) + float(rng.uniform(-0.5, 0.5))
        x, y = 12 + rng.uniform(-1, 1, 2)
        color = (220 if red else 20, 20 if red else 220, int(rng.integers(0, 60)))
        ImageDraw.Draw(picture).ellipse(
            (x - radius, y - radius, x + radius, y + radius), fill=color if filled else None, outline=color, width=2
        )
        picture.save(folder / "img_align_celeba" / f"{number:06d}.png")
        lines.append(f"{number:06d}.png " + " ".join("1" if has else "-1" for has in (filled, large, red)))
    (folder / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three agents' shards, one of public images and one to score on."""
    root = tmp_path_factory.mktemp("shapes")
    for number, (name, images) in enumerate((("a", 150), ("b", 150), ("c", 150), ("public", 80), ("test", 80))):
        folder = draw(root / name, images=images, seed=number)
        public = name in ("public", "test")
        embed_source(
            celeba_source(folder), PixelBackbone(size=8), root / f"{name}.shard", public=public, duplicates="keep-all"
        )
    return root


def run(shapes: Path, out: Path, *, text: str = TASK, **changes: Any) -> dict[str, Any]:
    out.parent.mkdir(exist_ok=True, parents=True)
    (out.parent / "task.toml").write_text(text)
    settings: dict[str, Any] = {
        "file": read_task_file(out.parent / "task.toml"),
        "shards": tuple(shapes / f"{name}.shard" for name in "abc"),
        "queries": shapes / "public.shard",
        "test": shapes / "test.shard",
        "out": out,
        "seed": 3,
    }
    return run_job(LabelingJob(**(settings | changes)))


@pytest.fixture(scope="module")
def finished(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run") / "out"
    return out, run(shapes, out)


def test_a_run_labels_every_attribute_of_every_public_image(
    shapes: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    out, report = finished
    table = pq.read_table(out / "student_labels.parquet")
    truth = Shard.open(shapes / "public.shard").labels
    said = np.column_stack([table[f"label.{name}"].to_numpy(zero_copy_only=False) for name in NAMES])
    right = float((said == truth).mean())
    assert right > 0.9
    assert report["images"]["accuracy"] == pytest.approx(right)
    assert [one["name"] for one in report["images"]["attributes"]] == list(NAMES)
    for place, (name, one) in enumerate(zip(NAMES, report["images"]["attributes"], strict=True)):
        assert one["recall"] == pytest.approx(recall_score(truth[:, place], said[:, place]))
        sure = table[f"confidence.{name}"].to_numpy()
        has = np.where(said[:, place], sure, 1 - sure)
        assert one["auroc"] == pytest.approx(roc_auc_score(truth[:, place], has), abs=1e-3)
    assert report["student"]["accuracy"] > 0.9
    assert report["student"]["kind"] == "attributes"
    for row, names in zip(said, table["labels"].to_pylist(), strict=True):
        assert names == [name for name, has in zip(NAMES, row, strict=True) if has]
    assert set(table["origin"].to_pylist()) == {"asked"}
    for name in NAMES:
        assert min(table[f"confidence.{name}"].to_pylist()) >= 0.5


def test_the_released_counts_are_the_votes_a_brute_search_finds_and_noise(
    shapes: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    table = pq.read_table(finished[0] / "pseudo_labels.parquet")
    noisy = np.array(table["noisy_votes"].to_pylist())
    public = Shard.open(shapes / "public.shard")
    votes = np.zeros(noisy.shape)
    for name in "abc":
        shard = Shard.open(shapes / f"{name}.shard")
        scores = np.asarray(public.features, dtype=np.int64) @ np.asarray(shard.features, dtype=np.int64).T
        for query, row in enumerate(scores.tolist()):
            ranked = sorted(range(len(row)), key=lambda record: (-row[record], int(shard.record_ids[record])))
            votes[query] += np.asarray(shard.labels)[ranked[:5]].sum(axis=0)
    assert set(table["label"].to_pylist()) == {-1}
    assert table["label_name"].null_count == len(table)
    spread = (noisy - votes).std()
    assert 0.85 < spread < 1.15  # sigma_votes = 1, of 240 numbers
    assert np.abs(noisy - votes).max() < 5


def test_everything_beside_the_labels_says_attributes(finished: tuple[Path, dict[str, Any]]) -> None:
    out, report = finished
    assert report["task"]["attributes_per_record"] == 3
    page = (out / "report.html").read_text()
    for said in ("Each attribute", "Images with it", "labeled right (always the commoner", "filled, large"):
        assert said in page
    assert "Answers by class" not in page
    assert "the attributes of its k records nearest to each question" in (out / "privacy_card.md").read_text()
    assert not (out / "vote_margins.png").exists()
    with pytest.raises(InvalidSetting, match="a column for each attribute"):
        stamp_of(pq.read_table(out / "student_labels.parquet"))


def test_a_csv_of_the_labels_is_a_table_that_embed_reads(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    table = pq.read_table(finished[0] / "student_labels.parquet")
    out = export_images("csv", ExportOrder(table, tmp_path / "labels.csv"))
    again = read_attributes(out, frozenset(table["source"].to_pylist()))
    assert again.names == NAMES
    for name, row in zip(table["source"].to_pylist(), table["labels"].to_pylist(), strict=True):
        assert [NAMES[place] for place in np.flatnonzero(again.rows[name])] == row
    with pytest.raises(InvalidSetting, match="one class per image"):
        export_images("label-studio", ExportOrder(table, tmp_path / "tasks.json"))


def test_the_student_labels_new_images_and_is_scored_on_them(
    shapes: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    model = read_model(finished[0] / "student.safetensors")
    found = predict_images(model, shapes / "test.shard")
    assert found.table.schema.names[:4] == ["source", "labels", "label.filled", "confidence.filled"]
    assert sum(found.counts.values()) == sum(map(len, found.table["labels"].to_pylist()))
    scored = score_student(finished[0] / "student.safetensors", test=shapes / "test.shard")
    assert scored["accuracy"] == pytest.approx(finished[1]["student"]["accuracy"])
    with pytest.raises(InvalidSetting, match=r"student\.safetensors"):
        read_job(finished[0])
    job = LabeledJob(finished[0])
    assert job.labels("arrow").num_rows == 80
    with pytest.raises(InvalidSetting, match=r"labeler\.load_student"):
        job.student  # noqa: B018
    with pytest.raises(InvalidSetting, match="one class per image"):
        job.dataset(shapes)


def test_clusters_and_a_cap_on_attributes_run_and_the_cap_costs_less(shapes: Path, tmp_path: Path) -> None:
    text = TASK + '[queries]\nstrategy = "clustered"\ncount = 20\n'
    all_of_them = run(shapes, tmp_path / "all" / "out", text=text)
    capped = run(shapes, tmp_path / "one" / "out", text=text.replace("k = 5", "k = 5\nattributes_per_record = 1"))
    assert all_of_them["images"]["accuracy"] > 0.7
    assert all_of_them["labels"]["asked"] == 20
    assert capped["privacy"]["instance"]["epsilon"] < all_of_them["privacy"]["instance"]["epsilon"]
    table = pq.read_table(tmp_path / "all" / "out" / "student_labels.parquet")
    assert set(table["origin"].to_pylist()) == {"inferred"}


@pytest.mark.parametrize("learner", ["linear", "network", "adapted"])
def test_models_vote_for_attributes_and_their_card_says_so(shapes: Path, tmp_path: Path, learner: str) -> None:
    text = TASK.replace('"knn"\nk = 5', '"ensemble"').replace("sigma_votes = 1.0", "sigma_votes = 0.2")
    text += f'attributes_per_record = 2\n[task.training]\nlearner = "{learner}"\n'
    report = run(shapes, tmp_path / "out", text=text)
    # A pixel's model sees less than its neighbors do, and the third attribute is silenced where the first two hold.
    assert report["images"]["accuracy"] > 0.7
    card = (tmp_path / "out" / "privacy_card.md").read_text()
    assert "the attributes that a model trained on its records sees in each question, the first 2 of each" in card
    assert (report["task"]["training"] is None) == (learner == "linear")


def test_what_does_not_fit_is_refused_before_anything_is_asked(shapes: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    for number, name in enumerate(("x", "y")):
        (plain / name).mkdir(parents=True)
        Image.linear_gradient("L").rotate(90 * number).save(plain / name / "0.png")
    embed_source(plain, PixelBackbone(size=8), tmp_path / "plain.shard", classes=NAMES[:2], public=True)
    embed_source(plain, PixelBackbone(size=8), tmp_path / "own.shard", classes=("x", "y"))
    with pytest.raises(InvalidTask, match="shards hold one class per record"):
        run(
            shapes, tmp_path / "a" / "out", text=TASK.replace("k = 5", "k = 1\nattributes_per_record = 2"),
            shards=(tmp_path / "own.shard",), queries=_public(plain, tmp_path, ("x", "y")), test=None,
        )  # fmt: skip
    with pytest.raises(MixedShards):
        run(shapes, tmp_path / "b" / "out", shards=(shapes / "a.shard", tmp_path / "own.shard"))
    with pytest.raises(MixedShards, match="holds one class per image"):
        run(shapes, tmp_path / "c" / "out", test=_public(plain, tmp_path, NAMES))
    with pytest.raises(InvalidTask, match="a head for each"):
        run(shapes, tmp_path / "s" / "out", text=TASK + '[student]\nkind = "pooled"\n')
    with pytest.raises(InvalidTask, match="only means something for method knn"):
        run(shapes, tmp_path / "d" / "out", text=TASK.replace('"knn"', '"reverse-knn"'))
    with pytest.raises(InvalidSetting, match="one class per record"):
        shard_pool(Shard.open(shapes / "a.shard"), seed=1)


def _public(images: Path, folder: Path, classes: tuple[str, ...]) -> Path:
    out = folder / f"{'-'.join(classes)}.shard"
    embed_source(images, PixelBackbone(size=8), out, classes=classes, public=True)
    return out


def _agent(shard: Shard) -> Agent:
    return Agent("agent-0001", shard)


def test_an_agent_refuses_a_task_about_classes_with_attributes_before_any_charge(shapes: Path) -> None:
    shard = Shard.open(shapes / "a.shard")
    fields: dict[str, Any] = {
        "name": "x", "method": "knn", "classes": NAMES, "k": 2, "sigma_votes": 9.0, "delta": 1e-4, "max_queries": 4,
        "agents": 2,
        "backbone_fingerprint": shard.fingerprint,
    }  # fmt: skip
    batch = QueryBatch(np.ascontiguousarray(shard.features[:4]))
    with pytest.raises(MixedShards, match="any number per record, and the task asks for one class"):
        _agent(shard).check(Task(**fields), batch)
    _agent(shard).check(Task(**fields, attributes_per_record=2), batch)
    with pytest.raises((MixedShards, PrivacyRefusal)):
        _agent(shard).ballots(Task(**fields), batch, bytes(32))


def test_heads_find_shares_and_shrink_where_noise_drowns_them() -> None:
    rng = np.random.default_rng(4)
    features = rng.normal(size=(400, 12))
    shares: NDArray[np.float64] = np.column_stack(
        [(features[:, 0] > 0).astype(float), np.full(400, 0.05), np.full(400, 0.9)]
    )
    quiet, loud = (
        label_attributes(
            30 * shares + sigma * rng.normal(size=shares.shape), features, features, most_votes=30, sigma=sigma,
            rows=np.arange(400),
        ).probabilities
        for sigma in (1.0, 200.0)
    )  # fmt: skip
    assert ((quiet >= 0.5) == (shares >= 0.5)).mean() > 0.99
    assert np.abs(quiet[:, 1] - 0.05).mean() < 0.05  # a rare attribute is read as rare
    assert loud[:, 0].std() < quiet[:, 0].std() / 2
    assert (loud >= 0).all()
    assert (loud <= 1).all()
