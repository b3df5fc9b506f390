"""CUDA devices: the driver, whether the libraries were built for them, and what is free.

Nothing here is computed; that is for the engines' steps. Each library is asked by itself, because one can see a device
that another was not built for.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from workers.doctor.finding import Finding, look, well, wrong

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_QUERY: Final = "--query-gpu=name,driver_version,memory.total,memory.used"
_LITTLE: Final = 2 << 30


def devices() -> Iterator[Finding]:
    """Driver, architectures, memory."""
    yield _driver()
    yield from _by_torch()


def built_for(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether a list such as ["sm_80", "sm_90", "compute_90"] holds code for a device.

    Code of one generation (sm_80) runs on later minor versions of it (8.6); what can be compiled at load (compute_90)
    runs on everything later. sm_90a and the like are counted for that version alone.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        version = divmod(int(number.rstrip("af") or 0), 10)
        if kind == "sm" and version == capability:
            return True
        if number.endswith(("a", "f")):
            continue
        if kind == "sm" and version[0] == capability[0] and version[1] <= capability[1]:
            return True
        if kind == "compute" and version <= capability:
            return True
    return False


def _driver() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        said = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else ""
        if said:
            return look(
                "driver",
                f"{said}; nvidia-smi is missing",
                "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        return wrong(
            "driver", "there is no NVIDIA driver here",
            "install the driver; in a container, start it with --gpus all (NVIDIA container toolkit)",
        )  # fmt: skip
    asked = subprocess.run([program, _QUERY, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    if asked.returncode:
        return wrong(
            "driver", f"nvidia-smi fails: {asked.stdout.strip() or asked.stderr.strip()}", "install the driver again"
        )
    return well("driver", "; ".join(asked.stdout.strip().splitlines()))


def _by_torch() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield wrong(
            "torch", f"torch {torch.__version__} is built for processors only", "install torch's wheel with CUDA"
        )
        return
    if not torch.cuda.is_available():
        yield wrong(
            "torch", f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device",
            "compare the driver's version with the one that this CUDA needs, and look at CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
        return
    architectures = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        words = f"{name}, compute capability {capability[0]}.{capability[1]}"
        if not built_for(architectures, capability):
            yield wrong(
                f"cuda:{number}", f"{words}; torch {torch.__version__} is built for {', '.join(architectures)}",
                "install a version of torch that is built for this device",
            )  # fmt: skip
            continue
        free, total = torch.cuda.mem_get_info(number)
        found = f"{words}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < _LITTLE:
            yield look(
                f"cuda:{number}",
                found,
                "end what else uses it (nvidia-smi lists it)",
                free_bytes=free,
                total_bytes=total,
            )
        else:
            yield well(f"cuda:{number}", found, free_bytes=free, total_bytes=total)
