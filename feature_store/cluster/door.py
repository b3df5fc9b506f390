"""The one door of Ray: a cluster of the party's own on this machine, or one that it runs at an address already.

Called in a process that drives Ray and does nothing else (`feature_store.cluster.driver`).

What we start ourselves listens on the loopback interface, asks for a random token that only its own processes know, has
no dashboard, tells nobody that it is used, prints no worker's output, puts no object on the disk, and has its folder
beside the shard, its owner's alone. It ends with the process that drives it, and that with the one that began it.

Of a cluster at an address all of this is the business of who runs it; we ask it for no more than workers.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from labeler.errors import InvalidSetting, Unavailable

_INSTALL: Final = "pip install 'private-labeler[ray]'"

_STORE_BYTES: Final = 512 << 20
"""Shared memory of a cluster of our own; a machine of less than eight times that gives an eighth."""

_LEAST_STORE_BYTES: Final = 80 << 20
"""Ray takes no less."""

_REGISTER_S: Final = 600
"""How long one of its processes may take to begin; Ray gives a minute."""

_REMOVALS: Final = 50
_PAUSE_S: Final = 0.2

_OWN: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: all that Ray starts listens on the loopback interface
    "RAY_AUTH_MODE": "token",
}


@dataclass(frozen=True)
class Cluster:
    """What there is to work with.

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
        raise InvalidSetting(f"Ray is not installed here; install it with {_INSTALL}, or do without a cluster")


def ray_module() -> ModuleType:
    """The library itself; only for who has called `open_cluster`, which says how it is to be imported."""
    import ray

    module: ModuleType = ray
    return module


def open_cluster(*, beside: Path | None, address: str | None, cpus: int | None) -> Cluster:
    """Start a cluster of our own, or join one; once in the life of a process.

    Args:
        beside: a shard, beside which a cluster of our own keeps its folder; the system's folder for temporary files
            where absent, or where nothing can be written there.
        address: host:port of a cluster that the party runs; one of our own where absent.
        cpus: processors of a cluster of our own; those that this process may use where absent.

    Raises:
        InvalidSetting: Ray is not installed.
        Unavailable: there is nothing at the address, or Ray does not start here.
    """
    check_installed()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address is not None:
        try:
            ray_module().init(address=address, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise Unavailable(
                f"no Ray cluster of this version can be used at {address} ({type(error).__name__}); look whether it "
                "runs, and whether this process has its token"
            ) from None
        return _counted(())
    os.environ.update(_OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
    folders = _folders(beside)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        ray_module().init(
            address="local",
            num_cpus=cpus or len(os.sched_getaffinity(0)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=max(_LEAST_STORE_BYTES, min(_STORE_BYTES, machine // 8)),
            _temp_dir=str(folders[-1]),
            _system_config={
                "automatic_object_spilling_enabled": False,
                # On a busy machine an interpreter takes longer than the minute after which Ray begins another, which
                # makes it busier: none of them ever comes to be there.
                "worker_register_timeout_seconds": _REGISTER_S,
            },
        )
    except Exception as error:
        remove_folders(folders)
        raise Unavailable(f"Ray does not start on this machine ({type(error).__name__}); do without it") from None
    return _counted(folders)


def end_cluster(found: Cluster) -> None:
    """Leave a cluster; one of our own ends, with all that it started."""
    ray_module().shutdown()
    remove_folders(found.folders)


def _counted(folders: tuple[Path, ...]) -> Cluster:
    found = ray_module().cluster_resources()
    return Cluster(max(1, int(found.get("CPU", 1))), int(found.get("GPU", 0)), folders)


def _folders(beside: Path | None) -> tuple[Path, ...]:
    """New folders of the owner's alone, the last of which Ray is told of.

    Ray opens the folder that it is told of to everybody, so it is told of one inside. A socket's path has at most 107
    characters, of which Ray takes some 65, so what it is told is a short link to where its files lie.
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
