"""Start several processes that train one network, and give each its rank and device.

    labeler student JOB --kind finetune ... --processes 2        starts them here, over the loopback interface
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:PORT \
        -m workers.cli student JOB --kind finetune ...           starts them on several machines, all inside one site

Students read released labels and public images only, so the messages between these processes are not secret. torch is
imported on first use, because the command line only asks for its rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from labeler.errors import InvalidSetting, TryAgain


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes that train together.

    Attributes:
        rank: number of this process, from 0; the first one saves and reports.
        count: number of processes.
        device: device of this process, as load_backbone takes it.
    """

    rank: int = 0
    count: int = 1
    device: str = "auto"

    @property
    def is_first(self) -> bool:
        return self.rank == 0


ALONE = Ranks()

_FIRST_SPEAKS_S = 20.0


def is_first_process() -> bool:
    """Return whether this process reports for all that were started together; True if it is alone."""
    return os.environ.get("RANK", "0") == "0"


def leave_it_to_the_first() -> None:
    """Give the first process time to report its error before this one does. Its failure ends the others."""
    if not is_first_process():
        time.sleep(_FIRST_SPEAKS_S)


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started with this one while the block runs; yield ALONE if there are none.

    Raises:
        InvalidSetting: this machine has GPUs, but fewer than processes.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as processes

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    gpus, here = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if 0 < gpus < here:
        raise InvalidSetting(
            f"each process needs a GPU of its own: {here} processes were asked for, and {gpus} are here"
        )
    if gpus:
        torch.cuda.set_device(local)
    processes.init_process_group("nccl" if gpus else "gloo", rank=rank, world_size=count)
    try:
        yield Ranks(rank, count, f"cuda:{local}" if gpus else "cpu")
        # No process leaves before all are done: the last collective operation fails if one has left.
        processes.barrier()
    finally:
        processes.destroy_process_group()


def run_in_ranks(arguments: Sequence[str], processes: int) -> int:
    """Run a labeler command in several processes of this machine, and wait for them.

    They share the output of this process, and only the first of them prints.

    Returns:
        The exit code of the first process that failed, or 0.

    Raises:
        TryAgain: a process was killed.
    """
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The process that fails reports its error itself, in one sentence.
    for logger in ("torch.distributed.elastic", "torchelastic-events-null"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="student",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "workers.cli", *arguments)
    except ChildFailedError as error:
        # When one fails, the launcher ends the others.
        codes = [failure.exitcode for failure in error.failures.values()]
        code = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)
        if code < 0:
            raise TryAgain(
                f"one of {processes} processes was killed (signal {-code}) and nothing was saved; run the same command "
                "again"
            ) from None
        return code
    return 0
