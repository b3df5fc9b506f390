"""Where an agent keeps what it trained, so that it answers the same when it is asked again.

Training is arithmetic in floating point: repeated in another process, with other threads or another library, it can end
a little elsewhere. Under the same noise two such answers would differ by the change, in clear. So what an agent answers
with is stored before the answer leaves, and a retry reads it. All of it is private, as secret as the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from feature_store.durable import replacing, sync_folder
from labeler.errors import BadData

Made = NDArray[np.int64]


class ModelStore(Protocol):
    """Keeps integers under (version of the records, name), for one agent."""

    def once(self, version: str, name: str, make: Callable[[], Made]) -> Made:
        """What is kept under the name; made and kept, durably, where there is nothing yet.

        What was made of another version of the records is forgotten: a deleted record must not live on in a model.
        """
        ...


class InMemoryModels:
    """For tests and simulations: kept as long as this object."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Made] = {}

    def once(self, version: str, name: str, make: Callable[[], Made]) -> Made:
        """See ModelStore."""
        if (version, name) not in self._kept:
            self._kept = {key: made for key, made in self._kept.items() if key[0] == version}
            self._kept[version, name] = make()
        return self._kept[version, name]

    def __repr__(self) -> str:
        return "InMemoryModels(<private>)"


class FolderModels:
    """A folder of its own, one file per model, readable by its owner only.

    Args:
        folder: made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def once(self, version: str, name: str, make: Callable[[], Made]) -> Made:
        """See ModelStore.

        Raises:
            BadData: a file is damaged; what was answered with it cannot be repeated.
        """
        begin = _hashed(version)
        path = self._folder / f"{begin}-{_hashed(name)}.npy"
        if not path.exists():
            self._forget(lambda other: not other.name.startswith(begin))
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path, mode=0o600) as temporary, temporary.open("wb") as file:
                np.save(file, make(), allow_pickle=False)
        try:
            made = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            made = None
        if not isinstance(made, np.ndarray) or made.dtype != np.int64:
            raise BadData(
                "a model that this agent had answered with is damaged, so the answer cannot be repeated; the batch can "
                "be asked in a new task, which is charged anew"
            )
        return made

    def clear(self) -> None:
        """Forget everything."""
        self._forget(lambda _: True)

    def _forget(self, unwanted: Callable[[Path], bool]) -> None:
        found = [path for path in self._folder.glob("*.npy") if unwanted(path)]
        for path in found:
            path.unlink(missing_ok=True)
        if found:
            sync_folder(self._folder)

    def __repr__(self) -> str:
        return f"FolderModels({self._folder.name!r})"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
