"""A process that speaks to Ray for this one, so that nothing that becomes of Ray becomes of an agent.

Ray takes the signals of the process that drives it, prints what it likes, and ends that process where its own are lost.
So it is driven from a process of its own, over a pair of sockets that only these two have: this one asks, that one
calls a function of ours and answers. It is begun at the first question, and after it was lost another at the next. It
ends when this one does, however that ends, and takes its cluster with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from inspect import isgenerator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from feature_store.cluster.door import Cluster, check_installed, end_cluster, open_cluster, remove_folders
from labeler.errors import LabelerError, Unavailable

_LOST: Final = (EOFError, OSError)
_ATTEMPTS: Final = 3
"""To begin: Ray gives each of its processes half a minute, which a busy machine may not keep."""

_END_S: Final = 60.0
"""Patience with a driver that ends its cluster."""


class Driver:
    """The process, and what it is asked.

    Args:
        beside, address, cpus: see `feature_store.cluster.door.open_cluster`.
    """

    def __init__(self, *, beside: Path | None = None, address: str | None = None, cpus: int | None = None) -> None:
        self._settings = {"beside": beside, "address": address, "cpus": cpus}
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._cluster: Cluster | None = None
        atexit.register(self.end)

    @property
    def cluster(self) -> Cluster:
        """What there is to work with; begins the process where there is none.

        Raises:
            InvalidSetting, Unavailable: see `feature_store.cluster.door.open_cluster`.
        """
        with self._lock:
            for attempt in range(1, _ATTEMPTS + 1):
                if self._cluster is not None:
                    break
                try:
                    self._begin()
                except Unavailable:
                    if attempt == _ATTEMPTS:
                        raise
            assert self._cluster is not None  # noqa: S101  # begun, or raised
            return self._cluster

    @property
    def process(self) -> int | None:
        """Its number; another one after it was lost. None where there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns there.

        Args:
            call: of a module of ours.
            arguments: of it; they are copied.

        Raises:
            LabelerError: what it raised.
            Unavailable: it raised something else, the process was lost, or does not begin.
        """
        with self._lock:
            _ = self.cluster
            self._send((call, arguments))
            return self._taken()[1]

    def stream(self, call: Callable[..., Generator[Any]], *arguments: Any) -> Generator[Any]:
        """What a generator yields there, one after the other; whoever leaves off before its end, ends the process.

        Raises:
            LabelerError: see `ask`.
        """
        with self._lock:
            _ = self.cluster
            self._send((call, arguments))
            is_over = False
            try:
                while not is_over:
                    kind, item = self._taken()
                    is_over = kind == "done"
                    if not is_over:
                        yield item
            except LabelerError:
                is_over = True
                raise
            finally:
                if not is_over:
                    self.end()

    def end(self) -> None:
        """End the process, and a cluster of its own with it; without one nothing happens."""
        with self._lock:
            process, pipe, found = self._process, self._pipe, self._cluster
            self._process = self._pipe = self._cluster = None
            if pipe is not None:
                pipe.close()
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()
                process.wait()
            if found is not None:
                remove_folders(found.folders)

    def _begin(self) -> None:
        check_installed()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us
                env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)},
            )
        self._pipe = Connection(ours.detach())
        self._send(self._settings)
        self._cluster = self._taken()[1]

    def _send(self, message: Any) -> None:
        assert self._pipe is not None  # noqa: S101  # begun
        try:
            self._pipe.send(message)
        except _LOST:
            raise self._lost() from None

    def _taken(self) -> tuple[str, Any]:
        assert self._pipe is not None  # noqa: S101  # begun
        try:
            kind, answer = self._pipe.recv()
        except _LOST:
            raise self._lost() from None
        if kind == "failed":
            if self._cluster is None:
                self.end()
            raise answer
        return kind, answer

    def _lost(self) -> Unavailable:
        self.end()
        return Unavailable("the process that drives Ray was lost; the next call begins another")


_shared: dict[str | None, Driver] = {}


def shared_driver(*, beside: Path | None, address: str | None) -> Driver:
    """The one driver of this process for a cluster of its own (begun beside the first shard that asks), or of one at
    an address."""
    if address not in _shared:
        _shared[address] = Driver(beside=beside, address=address)
    return _shared[address]


# The other side.


def _main(pipe: Connection) -> None:
    settings = pipe.recv()
    try:
        found = open_cluster(**settings)
    except LabelerError as error:
        pipe.send(("failed", error))
        return
    watching = threading.Thread(target=_end_with_who_began, args=(pipe.fileno(), found), daemon=True)
    watching.start()
    try:
        pipe.send(("done", found))
        while True:
            call, arguments = pipe.recv()
            for message in _answers(call, arguments):
                pipe.send(message)
    except _LOST:
        watching.join()


def _answers(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    try:
        answer = call(*arguments)
        if isgenerator(answer):
            for item in answer:
                yield "item", item
            answer = None
        yield "done", answer
    except LabelerError as error:
        yield "failed", error
    except Exception as error:
        # Its words could quote what was computed.
        yield "failed", Unavailable(f"the cluster failed ({type(error).__name__})")


def _end_with_who_began(handle: int, found: Cluster) -> None:
    """A long computation would not notice that nobody waits for it."""
    watch = select.poll()
    watch.register(handle, select.POLLHUP)
    while not watch.poll(1000):
        pass
    end_cluster(found)
    os._exit(0)


if __name__ == "__main__":
    # What is sent names the functions of the module as it is imported.
    from feature_store.cluster import driver

    driver._main(Connection(int(sys.argv[1])))
