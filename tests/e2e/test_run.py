"""`labeler run` end to end on real digits: what it gives back, and what an interruption cannot change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from feature_store.backbones.simclr import DIGITS_CONFIG, pretrain
from feature_store.results.image_labels import IMAGE_SCHEMA
from feature_store.results.pseudo_labels import SCHEMA
from feature_store.sources import open_source
from workers.run.labeling import open_run_journal


def test_a_job_gives_back_labels_a_student_and_a_report(labeler, federation, tmp_path) -> None:
    task = federation.task_file(tmp_path, colluding_agents=1)
    out = tmp_path / "job"
    summary = federation.run(labeler, task, out, *federation.scored)
    assert summary["labels"] | {"accuracy": None} == {
        "asked": 120, "answered": 120, "abstained": 0, "refused_budget": 0, "failed_quorum": 0, "accuracy": None,
    }  # fmt: skip
    # Real noise. In a dozen runs labels were right for 0.80 to 0.89 (standard deviation 0.03) and students for 0.86 to
    # 0.97 (0.03): both bounds are five standard deviations and more away, and guesses are right for 0.25.
    assert summary["labels"]["accuracy"] > 0.5
    assert summary["student"]["accuracy"] > 0.7
    assert summary["privacy"]["seeded"] is False
    assert json.loads((out / "report.json").read_text()) == summary
    table = pq.read_table(out / "pseudo_labels.parquet")
    assert table.schema.equals(SCHEMA)
    assert set(table["ledger_seq"].to_pylist()) == {1}
    assert set(table["task_digest"].to_pylist()) == {summary["task"]["digest"]}
    assert all(source.endswith(".png") for source in table["source"].to_pylist())
    student_labels = pq.read_table(out / "student_labels.parquet")
    assert student_labels.schema.remove_metadata().equals(IMAGE_SCHEMA)
    assert len(student_labels) == 120
    assert student_labels["origin"].to_pylist().count("asked") == summary["labels"]["answered"]
    pictures = federation.root / "public"
    exported = labeler("export", out, "--images", pictures, "--out", tmp_path / "labelled", "--json")
    assert json.loads(exported.out)["images"] == 120
    assert "class_label" in (tmp_path / "labelled" / "README.md").read_text()
    refused = labeler("export", "job_none", "--out", tmp_path / "none")
    assert refused.code == 2
    assert "is not a job's folder here" in refused.err
    assert "<svg" in (out / "report.html").read_text() or "data:image" in (out / "report.html").read_text()
    assert not {"secrets", "answers"} & {path.name for path in (out / ".job").iterdir()}


def test_a_job_that_bounds_records_of_a_person_needs_shards_that_know_them_and_states_the_price(
    labeler, federation, tmp_path
) -> None:
    """Each hundred digits are one writer's: the real embed, run and report, from a table of writers."""
    task = federation.task_file(tmp_path, method="reverse-knn", k=1, sigma_votes=4.0, records_per_person=2)
    refused = labeler("run", task, *federation.run_arguments, "--out", tmp_path / "refused", "--json")
    assert refused.code == 1
    assert "does not know whose records it holds" in refused.err
    shards = []
    for name in ("agent-1", "agent-2"):
        images = federation.root / name
        files = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
        table = tmp_path / f"{name}.csv"
        table.write_text("file,person\n" + "".join(f"{file},writer {int(file[-8:-4]) // 100}\n" for file in files))
        shards += ["--shard", tmp_path / f"{name}.shard"]
        made = labeler(
            "embed", images, "--backbone", "pixels:8", "--out", shards[-1], "--classes", "zero,one,two,three",
            "--persons", table,
        )  # fmt: skip
        assert made.code == 0, made.err
    out = tmp_path / "job"
    result = labeler("run", task, *shards, "--queries", federation.root / "public.shard", "--out", out, "--json")
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    person = summary["privacy"]["person"]
    assert person["records_per_person"] == 2
    assert person["epsilon"] > summary["privacy"]["instance"]["epsilon"]
    assert summary["task"]["records_per_person"] == 2
    assert "one person" in (out / "report.html").read_text()
    stated = json.loads(pq.read_schema(out / "pseudo_labels.parquet").metadata[b"privacy"])["person"]
    assert stated["epsilon"] == person["epsilon"]
    left = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"writer " not in left


@pytest.mark.long
def test_a_winner_release_stores_no_votes(labeler, federation, tmp_path) -> None:
    task = federation.task_file(tmp_path, release="winner")
    result = labeler("run", task, *federation.run_arguments, "--out", tmp_path / "job")
    assert result.code == 0, result.err
    table = pq.read_table(tmp_path / "job" / "pseudo_labels.parquet")
    assert table["noisy_votes"].null_count == len(table)
    with open_run_journal(tmp_path / "job" / ".job") as journal:
        (job,) = journal.jobs.list()
        releases = [journal.release(job.job_id, one.number) for one in journal.rounds(job.job_id)]
    assert releases
    assert all(release is not None and release.noisy_votes is None for release in releases)
    # What it prints: how good the labels are, the price, what was asked, where the report is, how to use the labels.
    said = [line.split()[0] for line in result.out.splitlines() if line[:1].strip()]
    assert said == ["Labels", "Privacy", "Questions", "Report", "Use"]
    report = json.loads((tmp_path / "job" / "report.json").read_text())
    labels = pq.read_table(tmp_path / "job" / "student_labels.parquet")
    assert report["images"]["checked"] == report["images"]["labelled"] == len(labels)
    assert (
        f"Labels    {report['images']['labelled']} images labeled, {report['images']['accuracy']:.1%} of them right; "
        f"they state a confidence of {report['images']['mean_confidence']:.1%} on average\n"
    ) in result.out
    assert report["images"]["mean_confidence"] == pytest.approx(labels["confidence"].to_numpy().mean(), abs=1e-5)
    assert f"Questions {report['labels']['answered']} of {report['labels']['asked']} answered; " in result.out
    assert labeler("status", tmp_path / "job").out == result.out
    assert labeler("status", tmp_path / "job", "--json").document == report


def test_three_talliers_find_the_winners_that_one_finds(labeler, federation, tmp_path) -> None:
    task = federation.task_file(tmp_path, release="winner", abstain_below=5)
    arguments = [*federation.run_arguments, "--seed", "3"]
    tables = []
    for winner in ("plain", "secure"):
        result = labeler("run", task, *arguments, "--winner", winner, "--out", tmp_path / winner)
        assert result.code == 0, result.err
        tables.append(pq.read_table(tmp_path / winner / "pseudo_labels.parquet")["label"].to_pylist())
    assert tables[0] == tables[1]


def test_clusters_of_a_folder_of_images_can_be_asked_about(labeler, federation, tmp_path) -> None:
    task = federation.task_file(
        tmp_path, method="reverse-knn", k=1, sigma_votes=2.0, queries='strategy = "clustered"\ncount = 12'
    )
    shards = [part for path in federation.agents for part in ("--shard", path)]
    result = labeler(
        "run",
        task,
        *shards,
        "--queries",
        federation.root / "public",
        "--backbone",
        "pixels:8",
        "--out",
        tmp_path / "job",
    )
    assert result.code == 0, result.err
    table = pq.read_table(tmp_path / "job" / "pseudo_labels.parquet")
    assert len(table) == 12
    assert table["query_id"][0].as_py() == "cluster-000000"


def test_a_seeded_run_is_reproducible_and_says_that_it_protects_nobody(labeler, federation, tmp_path) -> None:
    task = federation.task_file(tmp_path)
    votes = []
    for name in ("one", "two"):
        assert federation.run(labeler, task, tmp_path / name, "--seed", 7)["privacy"]["seeded"] is True
        table = pq.read_table(tmp_path / name / "pseudo_labels.parquet")
        assert json.loads(table.schema.metadata[b"seeded"]) is True
        votes.append(table["noisy_votes"].to_pylist())
    assert votes[0] == votes[1]
    assert "simulation" in (tmp_path / "one" / "report.html").read_text()


def test_two_real_runs_draw_different_noise_and_a_finished_one_is_not_run_again(
    labeler, federation, finished, tmp_path
) -> None:
    def votes(out: Path) -> np.ndarray:
        return np.array(pq.read_table(out / "pseudo_labels.parquet")["noisy_votes"].to_pylist())

    before, task = votes(finished), federation.task_file(tmp_path)
    for out in (finished, tmp_path / "job"):
        assert labeler("run", task, *federation.run_arguments, "--out", out).code == 0
    assert np.array_equal(votes(finished), before)
    assert np.mean(votes(tmp_path / "job") != before) > 0.99


def test_the_student_command_trains_every_kind(labeler, federation, finished, tmp_path) -> None:
    for kind in ("planned", "followed", "pooled", "blended"):
        result = labeler("student", finished, "--kind", kind, "--test", federation.root / "test.shard", "--json")
        assert result.code == 0, result.err
        # Real noise: 0.86 to 1.00 in a dozen runs of each kind, standard deviations of 0.03 and less.
        assert json.loads(result.out)["accuracy"] > 0.7
    assert labeler("student", finished, "--kind", "wizard").code == 2
    assert labeler("student", tmp_path).code == 1


@pytest.mark.long
def test_a_backbone_can_be_pretrained_on_public_images(labeler, federation, tmp_path) -> None:
    out = tmp_path / "backbone.safetensors"
    arguments = ("pretrain", federation.root / "public", "--out", out, "--epochs", 1, "--json")
    first, again = (json.loads(labeler(*arguments).out) for _ in range(2))
    assert first == again
    embedded = labeler("embed", federation.root / "test", "--backbone", out, "--out", tmp_path / "t.shard", "--json")
    assert json.loads(embedded.out)["fingerprint"] == first["fingerprint"]


@pytest.mark.long
def test_a_network_can_be_fine_tuned_on_the_answers(labeler, federation, tmp_path) -> None:
    task = federation.task_file(tmp_path)
    out, backbone = tmp_path / "job", tmp_path / "backbone.safetensors"
    labeler("run", task, *federation.run_arguments, "--seed", 1, "--out", out)
    source = open_source(federation.root / "public")
    config = DIGITS_CONFIG.model_copy(update={"epochs": 3})
    pretrain([source.read(number) for number in range(120)], config=config, seed=0, checkpoint=backbone)
    arguments = ["--kind", "finetune", "--images", federation.root / "public", "--backbone", backbone, "--json"]
    result = labeler("student", out, *arguments, "--test", federation.root / "test")
    assert result.code == 0, result.err
    tuned = json.loads(result.out)
    told = labeler("student", out, *arguments[:-1]).err
    assert told.index("Fine-tuning reads ") < told.index(" epochs of ") < told.index("Epoch 1 of ")
    assert " will take about " in told
    assert " left" in told
    assert "Epoch" not in result.err
    assert tuned["kind"] == "finetune"
    assert tuned["accuracy"] > 0.7
    assert Path(tuned["path"]).exists()
    assert labeler("student", out, "--kind", "finetune").code == 2
    wrong = labeler("student", out, *arguments[:2], "--images", tmp_path / "none", *arguments[4:])
    assert wrong.code == 2
    assert "check the path" in wrong.err


def test_a_job_whose_questions_were_all_left_without_an_answer_writes_what_was_paid_for(
    labeler, federation, tmp_path
) -> None:
    task = federation.task_file(tmp_path, release="winner", sigma_votes=4.0, abstain_below=1_000_000)
    out = tmp_path / "job"
    summary = federation.run(labeler, task, out)
    assert summary == json.loads((out / "report.json").read_text())
    assert summary["labels"] == {
        "asked": 120, "answered": 0, "abstained": 120, "refused_budget": 0, "failed_quorum": 0,
    }  # fmt: skip
    assert summary["student"] == {}
    assert any("no image has a label" in one for one in summary["warnings"])
    table = pq.read_table(out / "pseudo_labels.parquet")
    assert table.schema.equals(SCHEMA)
    assert (set(table["status"].to_pylist()), set(table["label"].to_pylist())) == ({"abstained"}, {-1})
    assert "student_labels.parquet" not in (out / "report.html").read_text(), (
        "the page links to no file that is not there"
    )
    for refused in (labeler("student", out), labeler("export", out, "--format", "csv", "--out", tmp_path / "x.csv")):
        assert refused.code == 1
        assert "no question was answered" in refused.err
