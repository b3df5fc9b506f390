"""A process that speaks to Ray for this one, so that a crash in Ray cannot take an agent down; and the one door of Ray.

Ray takes the signals of the process that drives it, prints what it likes, and ends that process when it loses its own.
So a separate process drives it, over a pair of sockets that only these two have: this one asks, the other calls a
function of ours and answers. It starts at the first question; if it is lost, the next question starts another. It ends
when this process does, however that ends, and takes its cluster with it.

A cluster that we start ourselves listens on the loopback interface. It asks for a random token that only its own
processes know, has no dashboard and reports no usage. It prints no worker's output and puts no object on the disk. Its
folder lies next to the shard, its owner's alone. A cluster at an address is the business of the party that runs it; we
ask it for no more than workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import isgenerator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from labeler.errors import InvalidSetting, LabelerError, Unavailable

_STORE_BYTES: Final = 512 << 20
"""Shared memory of a cluster of our own; a machine of less than eight times that gives an eighth."""

_LEAST_STORE_BYTES: Final = 80 << 20
"""Ray takes no less."""

_REGISTER_S: Final = 600
"""Time that one of its processes may take to start; Ray gives a minute.

On a busy machine an interpreter takes longer. Ray would start another then, which makes the machine busier.
"""

_OWN: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: all that Ray starts listens on the loopback interface
    "RAY_AUTH_MODE": "token",
}

_LOST: Final = (EOFError, OSError)
_ATTEMPTS: Final = 3
"""To start: Ray gives each of its processes half a minute, which a busy machine may not keep."""

_END_S: Final = 60.0
"""Patience with a driver that ends its cluster."""

_REMOVALS: Final = 50
_PAUSE_S: Final = 0.2


@dataclass(frozen=True)
class Cluster:
    """The resources of a cluster.

    Attributes:
        cpus: processors, at least 1.
        gpus: CUDA devices.
        folders: of a cluster of our own, for sockets and logs, the first the owner's alone; they go with it.
    """

    cpus: int
    gpus: int
    folders: tuple[Path, ...] = ()


def check_installed() -> None:
    """Refuse where there is no Ray; imports nothing.

    Raises:
        InvalidSetting: it is not installed.
    """
    if find_spec("ray") is None:
        raise InvalidSetting(
            "Ray is not installed here; install it with pip install 'private-labeler[ray]', or do without a cluster"
        )


class Driver:
    """The process, and the questions to it.

    Args:
        beside, address, cpus: see `open_cluster`.
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
        """The resources of the cluster; starts the process where there is none.

        Raises:
            InvalidSetting, Unavailable: see `open_cluster`.
        """
        with self._lock:
            attempt = 1
            while self._cluster is None:
                try:
                    self._begin()
                except Unavailable:
                    if attempt == _ATTEMPTS:
                        raise
                attempt += 1
            return self._cluster

    @property
    def process(self) -> int | None:
        """Its number; another one after it was lost. None where there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns there.

        Raises:
            LabelerError: what it raised.
            Unavailable: it raised something else, the process was lost, or does not start.
        """
        with self._lock:
            _ = self.cluster
            return self._answer((call, arguments))[1]

    def stream(self, call: Callable[..., Generator[Any]], *arguments: Any) -> Generator[Any]:
        """Yield what a generator yields there; closing this one before its end ends the process.

        Raises:
            LabelerError: see `ask`.
        """
        with self._lock:
            _ = self.cluster
            is_over = False
            try:
                kind, item = self._answer((call, arguments))
                while kind != "done":
                    yield item
                    kind, item = self._answer()
                is_over = True
            except LabelerError:
                is_over = True
                raise
            finally:
                if not is_over:
                    self.end()

    def end(self) -> None:
        """End the process, and its own cluster if it has one; without a process nothing happens."""
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
        try:
            self._cluster = self._answer(self._settings)[1]
        except LabelerError:
            self.end()
            raise

    def _answer(self, *question: Any) -> tuple[str, Any]:
        """Send a question if there is one, and take the next answer."""
        assert self._pipe is not None  # noqa: S101  # started
        try:
            for message in question:
                self._pipe.send(message)
            kind, answer = self._pipe.recv()
        except _LOST:
            self.end()
            raise Unavailable("the process that drives Ray was lost; the next call begins another") from None
        if kind == "failed":
            raise answer
        return kind, answer


_shared: dict[str | None, Driver] = {}


def shared_driver(*, beside: Path | None, address: str | None) -> Driver:
    """Return the one driver of this process for its own cluster, or for one at an address.

    Its own cluster is started next to the first shard that asks.
    """
    if address not in _shared:
        _shared[address] = Driver(beside=beside, address=address)
    return _shared[address]


# The side of the process that drives Ray.

_here: list[Cluster] = []


def cluster_here() -> Cluster:
    """The cluster that this process drives."""
    return _here[0]


def ray_module() -> ModuleType:
    """The library itself; only after `open_cluster`, which decides how it is imported."""
    import ray

    module: ModuleType = ray
    return module


def open_cluster(*, beside: Path | None, address: str | None, cpus: int | None) -> Cluster:
    """Start a cluster of our own, or join one; once in the life of a process.

    Args:
        beside: a shard, in whose parent folder a cluster of our own keeps its folder; the system's folder for temporary
            files where absent, or where nothing can be written there.
        address: host:port of a cluster that the party runs; one of our own where absent.
        cpus: processors of a cluster of our own; those that this process may use where absent.

    Raises:
        InvalidSetting: Ray is not installed.
        Unavailable: there is nothing at the address, or Ray does not start here.
    """
    check_installed()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folders: tuple[Path, ...] = ()
    if address is not None:
        settings: dict[str, Any] = {"address": address}
    else:
        os.environ.update(_OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
        folders = _folders(beside)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        settings = {
            "address": "local",
            "num_cpus": cpus or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "object_store_memory": max(_LEAST_STORE_BYTES, min(_STORE_BYTES, machine // 8)),
            "_temp_dir": str(folders[-1]),
            "_system_config": {
                "automatic_object_spilling_enabled": False,
                "worker_register_timeout_seconds": _REGISTER_S,
            },
        }
    try:
        ray_module().init(log_to_driver=False, logging_level="error", **settings)
    except Exception as error:
        remove_folders(folders)
        kind = type(error).__name__
        raise Unavailable(
            f"Ray does not start on this machine ({kind}); do without it"
            if address is None
            else f"no Ray cluster of this version can be used at {address} ({kind}); look whether it runs, and whether "
            "this process has its token"
        ) from None
    found = ray_module().cluster_resources()
    return Cluster(max(1, int(found.get("CPU", 1))), int(found.get("GPU", 0)), folders)


def _folders(beside: Path | None) -> tuple[Path, ...]:
    """New folders of the owner's alone; Ray gets the last one.

    Ray opens the folder that it gets to everybody, so it gets one inside. A socket's path has at most 107 characters,
    of which Ray takes some 65, so it gets a short link to the place of its files.
    """
    short = Path(tempfile.mkdtemp(prefix="ray-"))
    if beside is None or not os.access(beside.resolve().parent, os.W_OK):
        return short, short / "r"
    home = Path(tempfile.mkdtemp(prefix=f".{beside.name}.ray-", dir=beside.resolve().parent))
    (home / "r").mkdir()
    (short / "r").symlink_to(home / "r", target_is_directory=True)
    return home, short, short / "r"


def remove_folders(folders: tuple[Path, ...]) -> None:
    """Remove what a cluster of our own has on the disk: again for a while, as its last processes may still write."""
    for _ in range(_REMOVALS):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # of a link: nothing, it goes with the folder that holds it
        if not any(folder.exists() for folder in folders):
            return
        time.sleep(_PAUSE_S)


def _main(pipe: Connection) -> None:
    try:
        found = open_cluster(**pipe.recv())
        _here.append(found)
    except LabelerError as error:
        pipe.send(("failed", error))
        return
    watching = threading.Thread(target=_end_with_parent, args=(pipe.fileno(), found), daemon=True)
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


def _end_with_parent(handle: int, found: Cluster) -> None:
    """End with the process that asks: a long computation would not notice that nobody waits for it."""
    watch = select.poll()
    watch.register(handle, select.POLLHUP)
    while not watch.poll(1000):
        pass
    ray_module().shutdown()
    remove_folders(found.folders)
    os._exit(0)


if __name__ == "__main__":
    # A message names the functions of the module as it is imported.
    from feature_store.cluster import driver

    driver._main(Connection(int(sys.argv[1])))
