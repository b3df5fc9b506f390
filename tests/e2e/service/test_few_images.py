"""A few images labeled in one call by a whole federation: the blocks of the how-to page, and the same as a job."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from api.schema import LabelsRequest, LabelsView
from tests.e2e.service.conftest import Service
from tests.e2e.service.test_readme_service import ROOT, SHELL, run, spent

PAGE = (ROOT / "docs" / "how-to" / "few-images.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)
    return str(found)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_page_runs_as_pasted_and_the_budget_falls_by_the_price(service: Service, tmp_path: Path) -> None:
    before = spent(service)
    run([*SHELL, block("sh")], service, tmp_path)
    answer = LabelsView.model_validate_json((tmp_path / "labels.json").read_text())
    assert (answer.state, len(answer.labels)) == ("completed", 8)
    assert spent(service) - before == answer.price.instance_charge_nano
    (tmp_path / "federation").unlink()
    run([sys.executable, "-c", block("python")], service, tmp_path)
    assert spent(service) > before + (answer.price.instance_charge_nano or 0)
    assert json.loads(block("json").replace("...", "")).keys() <= LabelsRequest.model_fields.keys()
