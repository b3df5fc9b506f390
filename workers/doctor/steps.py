"""What a check-up consists of, in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from feature_store.index import ENGINES
from workers.doctor.alone import Step

_DEVICE_S: Final = 240.0
"""Limit of a step on a device: the first product of a fresh installation may compile for minutes."""


_ENGINE_S: Final = 120.0
"""A few seconds on a machine that does nothing else."""

_CALM: Final = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4"}
"""What only compares results uses threads, and does not let them spin: a busy machine took four times as long."""


def steps(home: Path, *, gpu: bool) -> list[Step]:
    """The steps for this machine.

    Args:
        home: folder that a party keeps, or will keep, its journal in.
    """
    place = {"home": str(home)}
    found = [
        Step("versions", "workers.doctor.system:versions"),
        Step("processor", "workers.doctor.system:processor"),
        Step("memory", "workers.doctor.system:memory"),
        Step("clock", "workers.doctor.system:clock"),
        Step("disk", "workers.doctor.home:disk", arguments=place, to_do="use a local disk for the home"),
        Step("journal", "workers.doctor.home:sqlite", arguments=place, to_do="use a local disk for the home"),
        Step("redis-server", "workers.doctor.home:redis_server", to_do="name a running redis-server instead"),
    ]
    if gpu:
        found.append(Step("devices", "workers.doctor.devices:devices", limit_s=_DEVICE_S, to_do=_DRIVER))
    for engine in ENGINES:
        if engine == "auto" or (engine.endswith("-gpu") and not gpu):
            continue
        limit = _DEVICE_S if engine.endswith("-gpu") else _ENGINE_S
        name = {"engine": engine}
        to_do = f'do not use it: set engine = "numpy", and run --only engine-{engine} again'
        found.append(Step(f"engine-{engine}", "workers.doctor.engines:check", limit, to_do, name, _CALM))
    found.append(
        Step("features", "workers.doctor.features:features", _DEVICE_S, arguments={"gpu": gpu}, environment=_CALM)
    )
    found.append(Step("speed", "workers.doctor.speed:speed", _DEVICE_S, arguments={"gpu": gpu}))
    return found


_DRIVER: Final = "look at nvidia-smi; a device that does not answer needs its driver, or the machine, to start again"
