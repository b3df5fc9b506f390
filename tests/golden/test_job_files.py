"""What a job leaves on disk keeps its bytes: digests taken with the code before there was one codec for each file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_store.results.job_process import QuestionRequest, write_questions
from feature_store.results.models import model_file
from feature_store.results.questions import (
    FAILURE,
    QUESTIONS,
    UPLOAD,
    read_stored_questions,
    write_failure,
)
from feature_store.rows import quantize
from labeler.errors import InvalidSetting
from labeler.planning import price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.release import Release, release_from_bytes, release_to_bytes
from labeler.task import parse_task

# The last two of sixteen digits depend on the processor's libraries; what is stated is a part in a million above.
EPSILONS_WRITTEN = {
    "instance": {"epsilon": 0.9273583530956093, "participant_epsilon": 1.048205223776173},
    "person": {"epsilon": 1.994206076912999, "participant_epsilon": 2.2594138111107878},
}

# Before, one of two digests each: the order of the metadata differed from process to process.
CHOSEN = {
    ("all", None): "3d21112010a70c5d68e240f7a334f463aa25abf9058443b652ff82202c722d26",
    ("random", 7): "e57c14c0b9c36eb7ddf48e7fd4dd63d77f79de78ffec9036a3db50542e60e35e",
    ("clustered", 5): "74d095a864b06bb63ce1f4b649e1fba3b9578858f57af4ceca9f0a7e62acdb56",
    ("weights", None): "2e8f80dd55c771dd1910f5baf7c9cc8c03e3b64c11614c5b791a7011f10e470a",
}
VOTES = np.random.default_rng(6).normal(size=(9, 3))
HISTOGRAM = Release("histogram", VOTES.argmax(axis=1).astype(np.int16), VOTES, frozenset({"west", "east"}), False)
WINNER = Release("winner", np.array([0, 2, -1, 1], np.int16), None, frozenset({"a", "b", "c"}), True)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("strategy", "count"), CHOSEN)
def test_questions_keep_their_bytes(tmp_path: Path, strategy: str, count: int | None) -> None:
    features = quantize(np.random.default_rng(5).normal(size=(40, 8)))
    column = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), 8)
    pq.write_table(pa.table({"name": [f"{n}.png" for n in range(40)], "feature": column}), tmp_path / UPLOAD)
    fields = {"strategy": strategy, "count": count, "seed": 3, "fingerprint": "f" * 64, "backbone": "pixels"}
    write_questions(tmp_path, QuestionRequest.model_validate(fields | {"source": "features"}))
    data = (tmp_path / QUESTIONS).read_bytes()
    stored = read_stored_questions(tmp_path / QUESTIONS)
    assert stored.to_bytes() == data
    assert digest(stored.to_bytes()) == CHOSEN[strategy, count]


def test_a_failure_keeps_its_bytes(tmp_path: Path) -> None:
    write_failure(tmp_path, InvalidSetting("too few images"))
    found = digest((tmp_path / FAILURE).read_bytes())
    assert found == "a4a6ed413188cf97ecf8c454ec86b176638b28ca7a5fe4ef8ae514ad60d822b0"


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        (HISTOGRAM, "425958a75d7db2e392e16d81139036a2c5601d1ef6c1defa28cef1d7df1311aa"),
        (WINNER, "d2d90bc220706adf54b3374485f7d9868b579124d3c16bcb826cddcc835a58e2"),
    ],
)
def test_releases_keep_their_bytes(release: Release, expected: str) -> None:
    data = release_to_bytes(release)
    assert digest(data) == expected
    assert release_to_bytes(release_from_bytes(data)) == data


def test_models_and_their_cards_keep_their_bytes() -> None:
    task = parse_task(
        {
            "name": "m",
            "classes": ["a", "b", "c"],
            "method": "blind-average",
            "sigma_votes": 4.0,
            "delta": 1e-5,
            "max_queries": 9,
            "agents": 5,
            "records_per_person": 2,
            "training": {"min_records": 200, "regularisation": 0.05},
        }
    )  # fmt: skip
    assert task.digest == "a08804945dd25a444d44800007f4a046f35324e1068102c8070cfdd8d54d9bb9"
    card = privacy_card(task, price(task), is_seeded=False)
    for level, written in EPSILONS_WRITTEN.items():
        for name, epsilon in written.items():
            assert card["guarantees"][level][name] == pytest.approx(epsilon, rel=1e-13, abs=0)
        card["guarantees"][level] |= written
    model = model_file({"weights": VOTES}, kind="linear", classes=task.classes, card=card)
    assert digest(json.dumps(card, sort_keys=True).encode()) == (
        "6ab449886abc8f29447847615cd995a51595068b99e92691accaabe5fa629fa0"
    )
    assert digest(model) == "4b289e75c625282858537ef64d662cc03ffed47f8ec86c9e8fb8a8da9ca9d50e"
    # Since an epsilon is never written below its value: of a person 1.995, where 1.994 stood for 1.9942.
    assert "level, where all records of one person at one agent" in card_in_words(card)
    assert "epsilon 1.995\n" in card_in_words(card)
    assert digest(card_in_words(card).encode()) == "bcb39eae8d3293b8103215c04291cb396580c3c3b9bdacbea664500749ac5172"
