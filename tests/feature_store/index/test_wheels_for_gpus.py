"""The wheel of torch holds code for the cards we name: an engine that lacks it would abort at its first search."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
CARDS = {75: "T4", 80: "A100", 86: "A10", 89: "L4", 90: "H100"}


@pytest.mark.skipif(torch.version.cuda is None, reason="this wheel of torch is for processors only")
def test_the_torch_wheel_has_code_for_every_card() -> None:
    flags = torch._C._cuda_getArchFlags().split()
    majors = {int(flag.removeprefix("sm_").rstrip("af")) // 10 for flag in flags if flag.startswith("sm_")}
    assert {card // 10 for card in CARDS} <= majors, flags


@pytest.mark.long
def test_where_a_gpu_is_required_its_tests_fail_instead_of_being_skipped() -> None:
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "0"]
    asked.append("tests/feature_store/test_timm_backbone.py")
    outcomes = {}
    for required in ("0", "1"):
        environment = os.environ | {"LABELER_REQUIRE_GPU": required, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        outcomes[required] = (done.returncode, "skipped" in done.stdout.splitlines()[-1], "failed" in done.stdout)
    assert outcomes == {"0": (0, True, False), "1": (1, False, True)}
