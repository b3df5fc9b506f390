"""A comparison of frozen backbones on Office-Caltech10: the default of `labeler embed`, a larger one, and MobileNetV2.

For each backbone and server domain there are two numbers. One says what the features can do: the share of the server's
photographs that exact neighbors label right without any privacy (k is 5 % of each agent's records, every agent's votes
as fractions). The other says what a user gets: the student's accuracy on unseen photographs where `reverse-knn` asks
about 15 clusters at epsilon 0.5 with one curious participant. Nothing is chosen on these servers.

A further row is a first job as the documents describe it: `amazon` and `dslr` label all of `webcam` with the defaults
of `labeler.run` (two questions for each class), at the same price, with 20 draws of noise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import (
    DELTA,
    DOMAINS,
    SPLITS,
    Arena,
    Setting,
    data_folder,
    embed_domains,
    mobilenet,
)
from benchmarks.sums import run_round
from feature_store.backbones import BackboneSpec
from feature_store.backbones.spec import PACKAGED
from feature_store.query_selection import select_queries
from feature_store.shard import Shard
from feature_store.students import NoisyAnswers, fit_student
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.solving import solve_sigma
from labeler.tally import QueryBatch
from labeler.task import parse_task
from workers.agent.agent import Agent
from workers.progress import ProgressCallback, silent

ASKED = Setting("reverse-knn", 1, 15, colluding_agents=1)
EPSILON = 0.5
NEIGHBOURS = 0.05
QUICK_SPLITS = 3
FIRST_JOB_DRAWS = 20


def bench_backbones(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Compare backbones; see the module."""
    root = data_folder(data)
    backbones: dict[str, BackboneSpec | str] = {name: name for name in PACKAGED}
    backbones["mobilenetv2"] = mobilenet(root)
    rows: list[BenchRow] = []
    for name, spec in in_turn(progress, "Backbones", backbones.items()):
        shards = embed_domains(root, progress, spec)
        arena = Arena(shards)
        for server in DOMAINS:
            rows.append(_without_privacy(name, server, shards))
            measured = arena.measure(server, ASKED, splits=SPLITS if full else QUICK_SPLITS, epsilon=EPSILON)
            rows.append(replace(measured, method=name, reference=None))
        rows.append(_first_job(name, shards, draws=FIRST_JOB_DRAWS if full else QUICK_SPLITS))
    return rows


def _without_privacy(backbone: str, server: str, shards: Mapping[str, Shard]) -> BenchRow:
    started = time.perf_counter()
    asked = shards[server]
    queries = asked.features.astype(np.float64)
    votes = np.zeros((len(queries), len(asked.classes)))
    for domain, shard in shards.items():
        if domain != server:
            k = max(1, round(NEIGHBOURS * len(shard)))
            near = np.argpartition(-(queries @ shard.features.astype(np.float64).T), k - 1, axis=1)[:, :k]
            labels = np.asarray(shard.labels)[near]
            votes += np.stack([(labels == label).mean(axis=1) for label in range(len(asked.classes))], axis=1)
    right = votes.argmax(axis=1) == np.asarray(asked.labels)
    return BenchRow(
        case=server,
        method=backbone,
        metric="labelled right by exact neighbours, without privacy, %",
        value=100 * float(right.mean()),
        seconds=time.perf_counter() - started,
        settings={"k": "5 % of each agent's records"},
    )


def _first_job(backbone: str, shards: Mapping[str, Shard], *, draws: int) -> BenchRow:
    started = time.perf_counter()
    public = shards["webcam"]
    questions = select_queries(public.features, strategy="clustered", count=2 * len(public.classes), seed=0)
    agents = [
        (Agent(name, shards[name], is_seeded=True), seeded_source(f"first job {name}".encode()).bytes(32))
        for name in ("amazon", "dslr")
    ]
    fields = {
        "name": "first job",
        "classes": public.classes,
        "method": "reverse-knn",
        "k": 1,
        "sigma_votes": 1.0,
        "delta": DELTA,
        "max_queries": len(questions),
        "agents": len(agents),
        "colluding_agents": 1,
        "backbone_fingerprint": public.fingerprint,
    }
    sigma = solve_sigma(parse_task(fields), EPSILON)
    right = []
    for draw in range(draws):
        task = parse_task(fields | {"sigma_votes": sigma, "nonce": f"draw {draw}"})
        release = run_round(task, QueryBatch(questions.features), agents)
        answers = NoisyAnswers.of(
            task,
            features=questions.features,
            labels=release.labels,
            noisy_votes=release.noisy_votes,
            assignment=questions.assignment,
        )
        student = fit_student("planned", answers, public.features, num_classes=task.num_classes, seed=0)
        right.append(100 * float((student.predict(public.features) == np.asarray(public.labels)).mean()))
    return mean_row(
        "webcam, all images, by amazon and dslr",
        backbone,
        "labelled right, %",
        right,
        epsilon=price(task).instance.epsilon,
        delta=DELTA,
        level="instance",
        seconds=time.perf_counter() - started,
        settings={"draws": draws, "queries": len(questions), "colluding_agents": 1, "sigma_votes": sigma},
    )
