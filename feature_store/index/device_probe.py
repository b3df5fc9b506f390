"""First contact with a device, in a process of its own: whatever it does to that process becomes a sentence here.

A library may abort on an error of CUDA, a driver can hang, and both after a charge would cost a budget and tell that
something in the records set it off. So before anything is charged a child process finds the devices and searches
synthetic records on each of them, in every shape that has surprised somebody, against the definition. What it found
is kept for this process.

    python -m feature_store.index.device_probe          the child: prints one line of JSON
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import nearest_by_definition
from feature_store.index.engine import Engine
from feature_store.index.exact_index import ExactIndex
from labeler.errors import InvalidSetting, LabelerError

TIME_LIMIT_S: Final = 180
"""The first use of CUDA on a machine may compile kernels, which takes a minute or two."""

_COMMAND: Final = [sys.executable, "-P", "-m", "feature_store.index.device_probe"]
_LOCK = threading.Lock()
_FOUND: Final[list[int | str]] = []

log = logging.getLogger(__name__)


def has_driver() -> bool:
    """Whether NVIDIA's driver library is there: without it there is no device, and no child is started to look."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def contact() -> int:
    """How many CUDA devices a child process found, each of them exact; asked once in a process's life.

    Raises:
        InvalidSetting: there is no device, one is not exact, or the child died of it; with what to use instead.
    """
    with _LOCK:
        if not _FOUND:
            _FOUND.append(_ask())
        found = _FOUND[0]
    if isinstance(found, str):
        raise InvalidSetting(f"engine torch-gpu needs a CUDA device that works here: {found}; use engine numpy or auto")
    return found


def found_or_none() -> int | None:
    """The same for "auto": what cannot be used is logged once, and the processor used instead."""
    is_news = not _FOUND
    try:
        return contact()
    except InvalidSetting as error:
        if is_news and has_driver():
            log.warning("no device is used", extra={"reason": str(error)})
        return None


def forget() -> None:
    """Ask again next time; for tests."""
    _FOUND.clear()


def _ask() -> int | str:
    if not has_driver():
        return "this machine has no NVIDIA driver"
    try:
        done = subprocess.run(
            _COMMAND, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"the first search on it did not end within {TIME_LIMIT_S} s"
    lines = done.stderr.strip().splitlines()
    said = f", saying {lines[-1][:200]!r}" if lines else ""
    if done.returncode < 0:
        return f"the first search on it ended its process with {signal.Signals(-done.returncode).name}{said}"
    try:
        answer = json.loads(done.stdout)
        return str(answer["refused"]) if "refused" in answer else int(answer["devices"])
    except (ValueError, KeyError, TypeError):
        return f"the first search on it failed with exit code {done.returncode}{said}"


# In the child


def probe(engine: Engine) -> str | None:
    """Search synthetic records with an engine; what is wrong with it, or None.

    Similarities reach the last bit below 2^24, all records tie, k goes over a tile's groups, and
    dimensions are those that kernels are chosen by.
    """
    for what, features, queries, counts in _trials():
        ids = np.random.default_rng(len(features)).permutation(len(features)).astype(np.int64)
        index = ExactIndex(features, ids, engine)
        for k in counts:
            found, expected = index.search(queries, k), nearest_by_definition(features, ids, queries, k)
            if index.engine is not engine:
                return f"it failed, or was not exact, on {what} with k = {k}"
            if not np.array_equal(found.record_ids, expected.record_ids):
                return f"it found other neighbours than the definition on {what} with k = {k}"
            if not np.array_equal(found.similarities, expected.similarities):
                return f"it rounded similarities on {what} with k = {k}"
    return None


_Trial = tuple[str, NDArray[np.int16], NDArray[np.int16], tuple[int, ...]]


def _trials() -> Iterator[_Trial]:
    rng = np.random.default_rng(20261122)
    top = np.full((1, 4), 2047, dtype=np.int16)
    near = np.repeat(top, 8, axis=0)
    near[:, 0] -= np.arange(8, dtype=np.int16)
    yield "similarities that differ in the last of 24 bits", np.concatenate([near, -near]), near, (1, 3, 16)
    for dimension in (1, 24, 768, 1280):
        vectors = rng.standard_normal((300, dimension))
        vectors *= 4090 / np.linalg.norm(vectors, axis=1, keepdims=True)
        rows = np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)
        rows[100:200] = rows[:100]
        yield f"records of {dimension} numbers, a third of them twice", rows, rows[:70], (1, 50, 300)
    tied = np.ones((2500, 24), dtype=np.int16)
    yield "records that all tie", tied, tied[:3], (1, 50, 2047, 2048, 2049)


def _found() -> dict[str, object]:
    import torch

    from feature_store.index.engine_torch import TorchEngine

    count = torch.cuda.device_count()
    for number in range(count):
        wrong = probe(TorchEngine(devices=[f"cuda:{number}"]))
        if wrong is not None:
            return {"refused": f"device {number}: {wrong}"}
    return {"devices": count} if count else {"refused": "torch sees no CUDA device"}


def main() -> None:
    """The child's part."""
    try:
        answer = _found()
    except LabelerError as error:
        answer = {"refused": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
