"""An export format has one name: in the command line, in REST, in Python, on the job's page and in the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from api.client import Client
from api.schema import JobView, LabelFormat
from feature_store.results import EXPORT_FORMATS, FILE_FORMATS, FILE_KINDS, FOLDER_FORMATS, RENAMED
from feature_store.results.exports import ExportOrder, export_images
from feature_store.results.label_files import FILE_WRITERS
from tests.api.console.test_static_files import Outline
from tests.api.routes.conftest import Service
from tests.api.routes.test_labels import completed, task  # noqa: F401  # fixtures
from tests.command_line import Labeler, labeler  # noqa: F401  # a fixture
from workers.commands.catalog import load_commands

DOCS = Path(__file__).parents[3] / "docs"


def enum_of(document: dict[str, Any]) -> set[str]:
    """The formats that a client may name, by /openapi.json."""
    given = document["paths"]["/v1/jobs/{job_id}/labels"]["get"]["parameters"]
    return set(next(one["schema"]["enum"] for one in given if one["name"] == "format"))


def test_every_door_lists_the_same_names(service: Service) -> None:
    with service.http("requester") as http:
        assert enum_of(http.get("/openapi.json").json()) == set(FILE_FORMATS)
    assert set(get_args(get_args(LabelFormat)[0])) == FILE_KINDS.keys() == FILE_WRITERS.keys() == set(FILE_FORMATS)
    assert set(EXPORT_FORMATS) == {*FILE_FORMATS, *FOLDER_FORMATS}
    (option,) = (one for one in load_commands(["export"])["export"].params if one.name == "format")
    assert option.help.startswith(", ".join(EXPORT_FORMATS))
    page = (DOCS / "how-to" / "export.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)) == set(EXPORT_FORMATS)
    assert [old for old in RENAMED if f"`{old}`" not in (DOCS / "upgrades.md").read_text()] == []


def test_the_page_of_a_job_has_a_button_for_every_file() -> None:
    buttons = [
        told for tag, told in Outline("/dashboard/").tags if tag == "button" and told.get("data-what") == "labels"
    ]
    assert [told["data-format"] for told in buttons if told["data-of"] == "images"] == list(FILE_KINDS)
    assert {told["data-format"] for told in buttons} <= set(FILE_FORMATS)
    page = (Path(__file__).parents[3] / "api" / "console" / "static" / "index.html").read_text()
    for name, kind in FILE_KINDS.items():
        assert f'data-format="{name}" data-of="images">{kind.title}</button>' in page


@pytest.mark.process
@pytest.mark.parametrize("name", [*EXPORT_FORMATS, *RENAMED])
def test_one_name_is_taken_by_every_door(
    service: Service,
    completed: JobView,  # noqa: F811
    labeler: Labeler,  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    to = ("--url", service.url, "--token", service.tokens["requester"])
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for source in "abc":
        (pictures / source).write_bytes(b"no picture, but bytes")
    told = labeler("export", completed.job_id, "--format", name, "--out", tmp_path / "cli", "--images", pictures, *to)
    assert told.code == 0, told.err
    assert ("is now" in told.err) == (name in RENAMED)
    with Client(service.url, service.tokens["requester"]) as client:
        table = pq.read_table(client.labels(completed.job_id, tmp_path / "labels.parquet"))
        assert export_images(name, ExportOrder(table, tmp_path / "python", pictures)).exists()  # type: ignore[arg-type]
        if name in FOLDER_FORMATS:
            return
        if name in RENAMED:
            with pytest.warns(DeprecationWarning, match="is now"):
                client.labels(completed.job_id, tmp_path / "rest", format=name)  # type: ignore[arg-type]
        else:
            client.labels(completed.job_id, tmp_path / "rest", format=name)  # type: ignore[arg-type]
    with service.http("requester") as http:
        sent = http.get(f"/v1/jobs/{completed.job_id}/labels", params={"format": name})
    assert sent.status_code == 200
    assert sent.content == (tmp_path / "rest").read_bytes()
    if name not in ("label-studio", "parquet"):  # tasks are sorted here, by doubt; a file of Parquet is one of many
        assert (tmp_path / "cli").read_bytes() == (tmp_path / "python").read_bytes() == sent.content
