"""One command for whoever has a GPU: `make gpu` runs every test that needs one, and says what to send back.

No test is skipped for want of a device: LABELER_REQUIRE_GPU=1 makes that a failure. What is written, into gpu/:

    tests.xml       each test, its outcome and its seconds
    doctor.json     what `labeler doctor --gpu --json` found, where this version has that command
    device.json     what `labeler bench device --full --json` measured
    machine.txt     cards, driver, and versions of what computes
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path("gpu")
PACKAGES = ("private-labeler", "torch", "torchvision", "timm", "faiss-gpu", "faiss-cpu", "numpy")
_CARDS = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,compute_cap", "--format=csv"]


def machine() -> str:
    """Cards, driver and versions; nothing that names the machine or who uses it."""
    lines = [f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if shutil.which(_CARDS[0]) is None:
        lines.append("no nvidia-smi: there is no NVIDIA driver on this machine, or it is not on the PATH")
    else:
        lines.append(subprocess.run(_CARDS, capture_output=True, text=True, check=False).stdout)
    return "\n".join(lines) + "\n"


def nameless(text: str) -> str:
    """A report without the names of this machine, its folders and its user: tracebacks and JUnit's format have them."""
    named = {str(Path.cwd()): ".", sys.prefix: "<environment>", str(Path.home()): "<home>", platform.node(): "<host>"}
    for name, instead in named.items():
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def main() -> int:
    """Run it all; 0 if every test passed and the doctor, where there is one, found nothing wrong."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "machine.txt").write_text(machine())
    environment = os.environ | {"LABELER_REQUIRE_GPU": "1"}
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", f"--junitxml={FOLDER / 'tests.xml'}", "tests"]
    tests = subprocess.run(pytest, env=environment, check=False).returncode
    doctor = _doctor()
    bench = _bench()
    for written in FOLDER.iterdir():
        written.write_text(nameless(written.read_text()))
    print("\n" + (FOLDER / "machine.txt").read_text())
    print("tests: " + ("all passed" if tests == 0 else f"failed (pytest ended with {tests})"))
    print("doctor: " + {None: "this version has none", 0: "nothing wrong"}.get(doctor, f"ended with {doctor}"))
    print("bench: " + ("measured" if bench == 0 else f"ended with {bench}"))
    print(f"Please send back the folder {FOLDER}/ as it is: " + ", ".join(sorted(one.name for one in FOLDER.iterdir())))
    print("It names cards, versions, tests and times; folders, user and host of yours are taken out.")
    return tests or doctor or bench


def _doctor() -> int | None:
    command = [sys.executable, "-m", "workers.cli", "doctor"]
    offered = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    if offered.returncode or "--gpu" not in offered.stdout:
        return None
    with (FOLDER / "doctor.json").open("w") as out:
        return subprocess.run([*command, "--gpu", "--json"], stdout=out, check=False).returncode


def _bench() -> int:
    """Ratios to bare libraries, on synthetic records."""
    command = [sys.executable, "-m", "workers.cli", "bench", "device", "--full", "--json"]
    with (FOLDER / "device.json").open("w") as out:
        return subprocess.run(command, stdout=out, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
