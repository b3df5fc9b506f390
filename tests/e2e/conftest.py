"""The command line, run in this process, and a small federation of real digit images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.command_line import Labeler as RunCommand
from tests.command_line import Outcome, labeler

__all__ = ["Outcome", "RunCommand", "labeler"]

CLASSES = ("zero", "one", "two", "three")


@dataclass(frozen=True)
class Federation:
    """Shards of two agents, a public and a test shard, folders of images, and a task file."""

    root: Path

    @property
    def agents(self) -> tuple[Path, Path]:
        return self.root / "agent-1.shard", self.root / "agent-2.shard"

    @property
    def run_arguments(self) -> list[object]:
        shards = [part for path in self.agents for part in ("--shard", path)]
        return [*shards, "--images", self.root / "public.shard"]

    @property
    def scored(self) -> tuple[object, object]:
        """The option that has a student scored."""
        return "--test", self.root / "test.shard"

    def run(self, labeler: RunCommand, task: Path, out: Path, *more: object) -> Any:
        """Run a job to its end; what it tells."""
        result = labeler("run", task, *self.run_arguments, "--out", out, "--json", *more)
        assert result.code == 0, result.err
        return result.document

    def task_file(self, folder: Path, *, queries: str = "", more: str = "", **fields: object) -> Path:
        settings: dict[str, object] = {
            "name": "digits",
            "method": "knn",
            "k": 5,
            "sigma_votes": 3.0,
            "delta": 1e-4,
        } | fields
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items() if value is not None]
        path = folder / "task.toml"
        path.write_text("[task]\n" + "\n".join(lines) + f"\n[queries]\n{queries}\n{more}\n")
        return path


def _toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Real digits 0 to 3 as image folders, embedded by their pixels."""
    from workers.embedder.shards import embed_images

    root = tmp_path_factory.mktemp("federation")
    digits = load_digits(n_class=len(CLASSES))
    order = np.random.default_rng(0).permutation(len(digits.target))
    parts = {"agent-1": order[:150], "agent-2": order[150:300], "public": order[300:420], "test": order[420:520]}
    for name, rows in parts.items():
        write_images(root / name, digits.images[rows], digits.target[rows], rows)
        public = name in ("public", "test")
        embed_images(root / name, "pixels:8", root / f"{name}.shard", classes=CLASSES, public=public)
    return Federation(root)


@pytest.fixture(scope="session")
def digit_features() -> np.ndarray:
    """Features of real digits as the `pixels:8` backbone makes them, int16, shape (1797, 64)."""
    from feature_store.backbones import load_backbone
    from feature_store.rows import quantize

    backbone = load_backbone("pixels:8")
    images = [Image.fromarray((image * (255 / 16)).round().astype(np.uint8)) for image in load_digits().images]
    return quantize(backbone.embed(images))


@pytest.fixture(scope="session")
def finished(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that is done, with the task that `task_file` writes and real noise."""
    from workers.run.labeling import run_job
    from workers.run.preparation import LabelingJob
    from workers.run.task_file import read_task_file

    folder = tmp_path_factory.mktemp("finished")
    file = read_task_file(federation.task_file(folder))
    run_job(LabelingJob(file, federation.agents, federation.root / "public.shard", folder / "job"))
    return folder / "job"


def write_images(folder: Path, images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> None:
    for image, label, row in zip(images, labels, rows, strict=True):
        path = folder / CLASSES[label] / f"digit-{row:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(path)


class SharedFederations:
    """Federations of real processes that files share: each starts where a test first asks for it.

    In forks (`tests/forks.py`) these files are one unit: each starts once. All are stopped behind it, and without
    forks where a folder ends and the next asks for none: what nobody asks any more would go on polling beside all the
    tests that follow, a dozen processes each.
    """

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}
        self._stack = ExitStack()

    def get(self, name: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """The one of this name; started where it does not run."""
        if name not in self._running:
            self._running[name] = self._stack.enter_context(start())
        return self._running[name]

    def stop(self) -> None:
        self._running.clear()
        self._stack.close()


SHARED = pytest.StashKey[SharedFederations]()


@pytest.fixture(scope="session")
def federations(request: pytest.FixtureRequest) -> Iterator[SharedFederations]:
    """See `SharedFederations`."""
    shared = request.config.stash[SHARED] = SharedFederations()
    yield shared
    shared.stop()


@pytest.fixture
def service(federations: SharedFederations, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One federation of three agents for all tests that leave it whole, whatever they do to it.

    Its accounts have no limit, for jobs that would be dear.
    """
    from tests.e2e.service.conftest import running

    def start() -> AbstractContextManager[Any]:
        home = tmp_path_factory.mktemp("shared") / "federation"
        return running(home, "--instance-epsilon", "unlimited")

    return federations.get("service", start)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop what tests share behind the last of a folder that asks, once that test has put everything back."""
    goes_on = isinstance(nextitem, pytest.Function) and (
        nextitem.path.parent == item.path.parent or "federations" in nextitem.fixturenames
    )
    if SHARED in item.config.stash and not goes_on:
        item.config.stash[SHARED].stop()
