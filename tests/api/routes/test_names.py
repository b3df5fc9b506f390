"""Names that people chose are shown, never obeyed: by a terminal, or as markup."""

from __future__ import annotations

import pytest

from tests.api.routes.conftest import FINGERPRINT, Service
from workers.cli import main


@pytest.mark.parametrize("name", ["x\x1b[2J\x1b]0;owned\x07", "two\nlines", "right\u202eto left"])
def test_a_name_with_control_characters_is_refused(service: Service, features: list[list[float]], name: str) -> None:
    task_id = service.task().task_id
    job = {"task_id": task_id, "features": features, "backbone_fingerprint": FINGERPRINT, "name": name}
    task = {"name": name, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": 9, "backbone_fingerprint": FINGERPRINT}
    classes = task | {"name": "t", "classes": ["a", name]}
    with service.http("admin") as http:
        for path, body in (
            ("/v1/jobs", job),
            ("/v1/tasks", task),
            ("/v1/tasks", classes),
            ("/v1/tokens", {"name": name, "role": "viewer"}),
        ):
            refused = http.post(path, json=body)
            assert refused.status_code in (400, 422), refused.text
            assert "only printable characters" in refused.text
            assert name not in refused.text


def test_square_brackets_in_a_name_are_no_markup_in_a_list_of_jobs(
    service: Service,
    features: list[list[float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = {"task_id": service.task().task_id, "features": features, "backbone_fingerprint": FINGERPRINT}
    with service.http("requester") as http:
        assert http.post("/v1/jobs", json=body | {"name": "[/x] :bomb:"}).status_code == 202
    monkeypatch.setenv("LABELER_URL", service.url)
    monkeypatch.setenv("LABELER_TOKEN", service.tokens["requester"])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["labeler", "status"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "[/x] :bomb:" in capsys.readouterr().out
