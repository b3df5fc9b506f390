"""What the tutorial shows of the service runs as it stands there: the command, curl alone, and the Python script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from feature_store.results.image_labels import IMAGE_SCHEMA
from tests.e2e.service.conftest import Service

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorials" / "service.md").read_text()
SHELL = ("bash", "-euo", "pipefail", "-c")


def block(language: str, word: str) -> str:
    """The one block of this language with a word."""
    found = [one for one in re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S) if word in one]
    assert len(found) == 1
    return str(found[0])


def run(command: list[str], service: Service, folder: Path) -> None:
    (folder / "federation").symlink_to(service.home)
    environment: Mapping[str, str] = os.environ | {
        "LABELER_URL": service.url,
        "LABELER_TOKEN": service.token,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def spent(service: Service) -> int:
    with service.client() as client:
        accounts = client.budget().accounts
    return next(one.posted_nano for one in accounts if (one.account, one.level) == ("federation", "instance"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_alone_prices_submits_watches_and_downloads_and_the_budget_falls_by_the_price(
    service: Service, tmp_path: Path
) -> None:
    before = spent(service)
    run([*SHELL, block("sh", "curl")], service, tmp_path)
    price = json.loads((tmp_path / "price.json").read_text())
    assert price["affordable"] is True
    assert price["price"]["instance_epsilon"] == pytest.approx(0.5, rel=1e-3)
    assert spent(service) - before == price["price"]["instance_charge_nano"]
    queries = json.loads((tmp_path / "queries.json").read_text())["items"]
    assert sum(one["share_nano"] for one in queries) == price["price"]["instance_charge_nano"]
    table = pq.read_table(tmp_path / "labels.parquet")
    assert table.schema.names == IMAGE_SCHEMA.names
    assert table.num_rows == 200
    assert set(table["origin"].to_pylist()) == {"inferred"}
    events = (tmp_path / "events.txt").read_text()
    assert json.loads(events.split("data: ")[-1].splitlines()[0])["state"] == "completed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "table"),
    [
        ([sys.executable, "-c", block("python", "connect")], "labels.parquet"),
        ([*SHELL, block("sh", "submit")], "by-command.parquet"),
    ],
    ids=["python", "command"],
)
def test_the_python_script_and_the_command_do_the_same(
    service: Service, tmp_path: Path, command: list[str], table: str
) -> None:
    before = spent(service)
    run(command, service, tmp_path)
    assert spent(service) > before
    assert pq.read_table(tmp_path / table).num_rows == 200
