"""A few images labeled in one call by a whole federation: the blocks of the how-to page, and the same as a job."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from api.client import ServiceProblem
from api.schema import LabelsRequest, LabelsView
from feature_store.shard import Shard
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import digits_as_files, new_task, posted
from tests.e2e.service.test_readme_service import ROOT, SHELL, run, spent

FEW = 8
PAGE = (ROOT / "docs" / "how-to" / "few-images.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)
    return str(found)


def in_base64(folder: Path) -> list[dict[str, str]]:
    files = sorted(folder.iterdir())
    return [{"name": file.name, "data": base64.b64encode(file.read_bytes()).decode()} for file in files]


def broken(path: Path) -> Path:
    """An image whose head is right, and whose pixels end too early."""
    packed = io.BytesIO()
    Image.effect_noise((64, 64), 60).save(packed, "PNG")
    path.write_bytes(packed.getvalue()[:1500])
    return path


def test_a_form_base64_and_a_job_of_the_same_images_give_equal_features_and_labels(
    service: Service, tmp_path: Path
) -> None:
    images = digits_as_files(tmp_path / "digits", 0, FEW)
    names = [f"{number:04d}.png" for number in range(FEW)]
    jobs = service.home / "coordinator" / "jobs"
    with service.client() as client:
        # Noise of half a vote cannot turn the label of an image on which sites agree.
        tasks = [new_task(client, f"way {way}", max_queries=2 * FEW, sigma_votes=0.5) for way in range(3)]
        request = LabelsRequest.model_validate({"task_id": tasks[1].task_id, "images": in_base64(images), "wait_s": 60})
        with ThreadPoolExecutor(2) as pool:
            by_form = pool.submit(client.label, tasks[0].task_id, images, wait_s=60, idempotency_key="few")
            as_text = pool.submit(client.ask, request)
            form, text = by_form.result(), as_text.result()
        job = client.wait(client.submit(tasks[2].task_id, images=images).job_id)
        table = pq.read_table(client.labels(job.job_id, tmp_path / "labels.parquet"))
        for answer in (form, text):
            assert answer.state == "completed"
            assert [row.source for row in answer.labels] == names == table["source"].to_pylist()
            assert {row.status for row in answer.labels} == {"answered"}
            assert all(0 < (row.confidence or 0) <= 1 for row in answer.labels)
        labels = [[row.label_name for row in answer.labels] for answer in (form, text)]
        assert labels == 2 * [table["label_name"].to_pylist()]
        shards = [Shard.open(jobs / one / "public.shard") for one in (form.job_id, text.job_id, job.job_id)]
        assert len({shard.features.tobytes() for shard in shards}) == 1

        # What a row says of its image is what the job's own labels say of it.
        own = pq.read_table(client.labels(form.job_id, tmp_path / "form.parquet"))
        assert [row.confidence for row in form.labels] == own["confidence"].to_pylist()

        before = posted(client)
        with pytest.raises(ServiceProblem, match=r"'broken.png' cannot be asked about: .*damaged") as refused:
            client.label(tasks[0].task_id, [*sorted(images.iterdir())[:2], broken(tmp_path / "broken.png")], wait_s=60)
        assert refused.value.status == 422
        again = client.label(tasks[0].task_id, images, wait_s=60, idempotency_key="few")
        assert again == form
        assert posted(client) == before


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
