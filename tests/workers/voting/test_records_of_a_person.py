"""The cut per person: made once, before any way to answer, and the proof's bounds hold for what really runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.shard import Shard
from labeler.errors import PrivacyRefusal
from labeler.methods.aux_distill import head_terms
from labeler.methods.blind_average import linear_terms, weight_sum
from labeler.planning import integer_event
from labeler.records import first_of_each_person
from labeler.system.site_key import SiteKey
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.answering import AnsweringAgent
from tests.labeler.tasks import make_task
from tests.workers.builders import agent_of, shard_of_rows
from workers.learning.private_heads import fit_heads
from workers.voting import select_records

CLASSES = ("cat", "dog", "eel")
DIMENSION = 6
KEY = SiteKey(b"k" * 32)
TRAINING = {"min_records": 10, "regularisation": 0.5, "dimension": 2, "radius": 50.0}


def _shard(folder: Path, persons: list[int] | None, *, seed: int = 0, rows: list[int] | None = None) -> Shard:
    """A shard of this number of records; `rows` writes only some of them, which keep their ids, features and labels."""
    count = 40 if persons is None else len(persons)
    random = np.random.default_rng(seed)
    features, labels = random.normal(size=(count, DIMENSION)), random.integers(0, 3, count).astype(np.int16)
    ids = random.permutation(10_000)[:count]
    chosen = list(range(count)) if rows is None else rows
    wanted = np.array([ids[row] for row in chosen], dtype="<u8") << np.uint64(1)
    told = None if persons is None else KEY.digests("person", [str(persons[row]).encode() for row in chosen])
    return shard_of_rows(
        folder, features[chosen], labels[chosen], classes=CLASSES, persons=told, site_key=KEY.name,
        random_bytes=lambda size: wanted.tobytes()[:size],
    )  # fmt: skip


def _task(method: str, **changes: Any) -> Task:
    fields: dict[str, Any] = {"classes": CLASSES, "sigma_votes": 30.0, "agents": 1, "backbone_fingerprint": "f"}
    fields["max_queries"] = DIMENSION + 1 if method == "blind-average" else 12
    if method in ("blind-average", "aux-distill"):
        fields["training"] = TRAINING
    return make_task(method=method, **fields | changes)


def _agent(shard: Shard) -> AnsweringAgent:
    return agent_of(shard)


def _batch(task: Task, tmp_path: Path) -> QueryBatch:
    rows = np.random.default_rng(5).normal(size=(task.max_queries, DIMENSION))
    return QueryBatch(shard_of_rows(tmp_path / "public", rows).features[:])


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_of_each_person_the_records_of_the_smallest_ids_are_kept(persons: list[int], most: int, random: Any) -> None:
    ids = list(range(len(persons)))
    random.shuffle(ids)
    digests = KEY.digests("person", [str(person).encode() for person in persons])
    kept = first_of_each_person(digests, np.array(ids, dtype=np.int64), most)
    for person in set(persons):
        mine = sorted((ids[row], row) for row in range(len(persons)) if persons[row] == person)
        assert [bool(kept[row]) for _, row in mine] == [place < most for place in range(len(mine))]


def test_the_first_records_are_chosen_among_those_that_are_not_deleted(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "s", [0, 0, 0, 1, 1, 2])
    assert shard.persons is not None
    of_first = (shard.persons == KEY.digests("person", [b"0"])).all(axis=1)
    mine, others = sorted(shard.record_ids[of_first].tolist()), set(shard.record_ids[~of_first].tolist())
    assert len(mine) == 3
    for first in mine:
        kept = set(select_records(shard, records_per_person=1).record_ids.tolist())
        assert len(kept) == 3
        assert kept - others == {first}
        shard.delete([first])
    assert len(select_records(shard, records_per_person=1)) == 2


def _sent(shard: Shard, task: Task, batch: QueryBatch) -> np.ndarray:
    """Return the contribution; for aux-distill both heads on the grid before their own noise."""
    if task.method != "aux-distill":
        return _agent(shard).ballots(task, batch)
    terms, records = head_terms(task), select_records(shard, records_per_person=task.records_per_person)
    queries = batch.features.astype(np.float32) / 2048
    heads = fit_heads(records.features / np.float32(2048), records.labels, queries[::5], terms=terms)
    assert heads.scores is not None
    both = [heads.head.ravel() / terms.head_noise, heads.scores.ravel() / terms.score_noise]
    return terms.mechanism.quantize(np.concatenate(both))


@pytest.mark.parametrize("method", ["knn", "reverse-knn", "ensemble", "blind-average", "aux-distill"])
def test_every_method_answers_with_the_same_cut(method: str, tmp_path: Path) -> None:
    """The answer under the cut is that of a shard that holds the kept records and no others, bit for bit."""
    persons = [0] * 20 + [1] * 10 + list(range(2, 12))
    whole = _shard(tmp_path / "whole", persons)
    kept = set(select_records(whole, records_per_person=2).record_ids.tolist())
    ids = np.random.default_rng(0)
    ids.normal(size=(40, DIMENSION)), ids.integers(0, 3, 40)
    all_ids = ids.permutation(10_000)[:40].tolist()
    rows = [row for row in range(40) if all_ids[row] in kept]
    assert len(rows) == 14
    only = _shard(tmp_path / "only", persons, rows=rows)
    task = _task(method, records_per_person=2)
    batch = _batch(task, tmp_path)
    cut = _sent(whole, task, batch)
    assert cut.tolist() == _sent(only, task, batch).tolist()
    assert _sent(whole, _task(method), batch).tolist() != cut.tolist()


def test_a_planted_person_uses_most_of_what_a_model_is_priced_for(tmp_path: Path) -> None:
    """Three equal records of one person move an svm by nearly three times what one does: the factor is needed."""
    terms_task = _task(
        "blind-average", records_per_person=3, sigma_votes=100.0,
        training={"min_records": 40, "regularisation": 2.0, "learner": "svm", "radius": 50.0, "iterations": 400},
    )  # fmt: skip
    batch = _batch(terms_task, tmp_path)
    features = np.zeros((40, DIMENSION))
    features[:, 0] = 1.0
    features[3:, 0], features[3:, 1] = 0.0, 1.0

    def ballots(name: str, rows: slice) -> np.ndarray:
        told = KEY.digests("person", [b"one"] * 3 + [str(row).encode() for row in range(37)])
        of_rows = features[rows], np.zeros(40, np.int16)[rows]
        shard = shard_of_rows(tmp_path / name, *of_rows, classes=CLASSES, persons=told[rows], site_key=KEY.name)
        return _agent(shard).ballots(terms_task, batch)

    moved = np.linalg.norm((ballots("with", slice(0, 40)) - ballots("without", slice(3, 40))).astype(float))
    one = weight_sum(terms_task).scale * 1.0
    assert linear_terms(terms_task).sensitivity > 0
    bound = integer_event(terms_task, "person", terms_task.max_queries)
    assert bound is not None
    assert 1.2 * one < moved <= float(bound.squared_sensitivity) ** 0.5


def test_a_shard_that_was_not_told_whose_records_it_holds_is_refused_before_the_charge(tmp_path: Path) -> None:
    """In both of two neighboring shards, with the same words: it depends on their set-up alone."""
    said = set()
    for name, rows in (("one", list(range(40))), ("other", list(range(39)))):
        shard = _shard(tmp_path / name, None, rows=rows)
        agent = agent_of(shard)
        task = _task("knn", records_per_person=2)
        batch = QueryBatch(shard.features[:12])
        with pytest.raises(PrivacyRefusal, match="does not know whose records") as refused:
            agent.answer(task, batch)
        said.add(str(refused.value))
        assert not agent.charged
        assert agent.answer(_task("knn"), batch)
    assert len(said) == 1


def test_the_index_of_one_cut_is_not_searched_for_another(tmp_path: Path) -> None:
    shard = _shard(tmp_path / "s", [0] * 30 + list(range(1, 11)))
    agent = _agent(shard)
    assert "40" not in repr(select_records(shard, records_per_person=None))
    batch = QueryBatch(shard.features[:12])
    for most in (1, 30, 2, None, 1):
        for k in (3, 40):
            task = _task("knn", k=k, records_per_person=most)
            found = agent.ballots(task, batch)
            assert found.tolist() == _agent(shard).ballots(task, batch).tolist()
            assert set(found.sum(axis=1).tolist()) == {min(k, 40 if most is None else 10 + most)}
