"""One token's uploads, kept and arriving, are bounded in bytes: the application in memory, and real files."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import zipfile
from collections import namedtuple
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.types import Message

from api import limits, request_context
from api.app import create_app
from api.coordinator.config import CoordinatorConfig, LimitsTable
from api.coordinator.service import Coordinator
from api.schema import PartyRequest, TaskRequest
from labeler.caps import CapsTable
from labeler.driver.mail_memory import MemoryMailbox
from labeler.system.keys import PartyKeys
from tests.api.routes.conftest import AGENTS, CLASSES, DIMENSION, FINGERPRINT, TALLIERS

MIB: Final = 2**20
QUOTA: Final = 4 * MIB
FORM: Final = "multipart/form-data; boundary=x"
USED_UP: Final = "urn:labeler:problem:quota-used-up"


@dataclass
class House:
    """A coordinator that is not served, its application, and two requesters' tokens."""

    config: CoordinatorConfig
    coordinator: Coordinator
    app: FastAPI
    secrets: list[str]
    task_id: str

    def asked(self, token: int = 0, **headers: str) -> Asked:
        return Asked(self.app, self.secrets[token], {key.replace("_", "-"): one for key, one in headers.items()})

    def job(self, count: int, token: int = 0) -> Answer:
        """Submit vectors as JSON."""
        body = {"task_id": self.task_id, "features": np.eye(count, DIMENSION).tolist()}
        content = json.dumps(body | {"backbone_fingerprint": FINGERPRINT}).encode()
        asked = self.asked(token, content_type="application/json", content_length=str(len(content)))
        return asyncio.run(asked.whole(content))

    def kept_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.config.home.glob("jobs/*/upload.parquet"))


@dataclass
class Answer:
    """An answer, and how many bytes of the body had been taken when it came."""

    status: int = 0
    body: bytes = b""
    taken: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def problem(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Asked:
    """One POST to /v1/jobs, sent by hand."""

    app: FastAPI
    secret: str
    headers: dict[str, str]

    async def whole(self, content: bytes) -> Answer:
        async def parts() -> AsyncIterator[bytes]:
            yield content

        return await self.of(parts())

    async def of(self, parts: AsyncIterator[bytes]) -> Answer:
        """Send parts until there are no more."""
        answer = Answer()
        taken = 0

        async def receive() -> Message:
            nonlocal taken
            try:
                part = await anext(parts)
            except StopAsyncIteration:
                return {"type": "http.request", "body": b"", "more_body": False}
            taken += len(part)
            return {"type": "http.request", "body": part, "more_body": True}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers, answer.taken = message["status"], dict(message["headers"]), taken
            answer.body += bytes(message.get("body", b""))

        headers = {"authorization": f"Bearer {self.secret}", "content-type": FORM} | self.headers
        if "content-length" not in headers:
            headers["transfer-encoding"] = "chunked"
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/v1/jobs",
            "raw_path": b"/v1/jobs", "query_string": b"", "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("x", 80), "headers": [(name.encode(), one.encode()) for name, one in headers.items()],
        }  # fmt: skip
        await self.app(scope, receive, send)
        return answer


@contextmanager
def opened(home: Path, **bounds: int) -> Iterator[House]:
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    caps = CapsTable(instance_epsilon=50.0, agent_epsilon="unlimited")
    config = CoordinatorConfig(
        home=home, redis_url="redis://127.0.0.1:1/0", public_url="http://127.0.0.1:8080", classes=CLASSES,
        federation=caps, agents=caps, backbones={FINGERPRINT: "pixels"},
        limits=LimitsTable(**({"max_token_bytes": QUOTA, "max_upload_bytes": QUOTA} | bounds)),
    )  # fmt: skip
    coordinator = Coordinator.open(config, mailbox=MemoryMailbox())
    try:
        if not coordinator.stores.parties.list():
            for name in (*AGENTS, *TALLIERS):
                keys = PartyKeys.generate().public
                coordinator.roster.enrol(
                    PartyRequest(
                        party_id=name,
                        role="agent" if name in AGENTS else "tallier",
                        verify_key=keys.verify_key,
                        seal_key=keys.seal_key,
                        tallier=None if name in AGENTS else TALLIERS.index(name),
                    )
                )
        secrets, task_id = [], ""
        for name in ("one", "another"):
            record, secret = coordinator.tokens.create(name, "admin")
            secrets.append(secret)
            task_id = (
                task_id
                or coordinator.create_task(
                    TaskRequest.model_validate(
                        {
                            "name": "t",
                            "classes": CLASSES,
                            "method": "knn",
                            "k": 1,
                            "sigma_votes": 20.0,
                            "delta": 1e-5,
                            "max_queries": 1000,
                        }
                        | {"backbone_fingerprint": FINGERPRINT}
                    ),
                    by=record.token_id,
                ).task_id
            )
        app = create_app(coordinator)
        app.state.shutdown = request_context.Shutdown()
        yield House(config, coordinator, app, secrets, task_id)
    finally:
        coordinator.stop()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with opened(tmp_path / "home") as made:
        yield made


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room, whatever this machine's has; a refused body is not read further."""
    set_free(monkeypatch, 2**40)
    monkeypatch.setattr(request_context, "DISCARD_BYTES", 0)


def set_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**41, 0, size))


async def never() -> AsyncIterator[bytes]:
    raise AssertionError("a body was read before it was refused")
    yield b""


async def pieces(size: int) -> AsyncIterator[bytes]:
    yield b'--x\r\nContent-Disposition: form-data; name="archive"; filename="a.zip"\r\n\r\n'
    for _ in range(size // 65536):
        yield bytes(65536)


async def crumbs(size: int) -> AsyncIterator[bytes]:
    """Yield what `pieces` does as a slow network delivers it."""
    async for piece in pieces(size):
        for start in range(0, len(piece), 8192):
            yield piece[start : start + 8192]


async def halted() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def used_up(answer: Answer) -> bool:
    if answer.status != 429:
        return False
    assert answer.problem["type"] == USED_UP
    assert str(QUOTA) in answer.problem["detail"]
    assert int(answer.headers[b"retry-after"]) >= 60
    return True


def test_bodies_of_one_token_that_would_take_more_than_its_quota_are_refused_before_they_are_read(house: House) -> None:
    async def many() -> list[Answer]:
        before = [asyncio.create_task(house.asked(content_length=str(MIB)).of(halted())) for _ in range(3)]
        await asyncio.sleep(0)
        while sum(house.coordinator.uploads._used.values()) < 3 * MIB:
            await asyncio.sleep(0.01)
        refused = await house.asked(content_length=str(2 * MIB)).of(never())
        another = asyncio.create_task(house.asked(1, content_length=str(2 * MIB)).of(halted()))
        done, _ = await asyncio.wait({another}, timeout=0.5)
        assert not done, "another token is not concerned"
        for task in (*before, another):
            task.cancel()
        await asyncio.gather(*before, another, return_exceptions=True)
        return [refused, await house.asked(content_length=str(4 * MIB)).whole(b"--x--")]

    refused, after = asyncio.run(many())
    assert used_up(refused)
    assert str(3 * MIB) in refused.problem["detail"], "what is used"
    assert after.status == 422, "what was given up counts no longer"


def test_a_body_without_a_length_is_cut_where_it_reaches_the_quota(house: House) -> None:
    answer = asyncio.run(house.asked().of(pieces(64 * MIB)))
    assert used_up(answer)
    assert answer.taken <= QUOTA + 2 * 65536
    assert not list(house.config.home.glob("incoming/*"))
    assert not house.coordinator.uploads._used


def test_uploads_of_waiting_jobs_count_after_a_restart_too_and_until_the_job_ends(house: House, tmp_path: Path) -> None:
    made = house.job(6)
    assert made.status == 202, made.body
    kept = house.kept_bytes()
    assert kept > 0
    rest = house.asked(content_length=str(QUOTA - kept + 1))
    assert used_up(asyncio.run(rest.of(never())))
    assert not used_up(asyncio.run(house.asked(content_length=str(QUOTA - kept)).whole(b"")))
    house.coordinator.stop()
    with opened(tmp_path / "home") as again:
        again.secrets[0] = house.secrets[0]
        assert used_up(asyncio.run(again.asked(content_length=str(QUOTA - kept + 1)).of(never())))
        job_id = made.problem["job_id"]
        again.coordinator.stores.settlement.end(again.coordinator.stores.jobs.get(job_id), "cancelled", None)
        again.coordinator._retention.sweep()
        assert not used_up(asyncio.run(again.asked(content_length=str(QUOTA)).whole(b"")))
        assert not again.coordinator.uploads._used


def bitmaps(count: int) -> bytes:
    """A zip of black bitmaps of 3/4 MiB each, some kilobytes in all."""
    picture, packed = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (512, 512)).save(picture, format="bmp")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(count):
            archive.writestr(f"{number}.bmp", picture.getvalue())
    return packed.getvalue()


def form_of(house: House, archive: bytes) -> bytes:
    request = json.dumps({"task_id": house.task_id, "selection": {"strategy": "all"}}).encode()
    parts = ((b'name="request"', request), (b'name="archive"; filename="a.zip"', archive))
    heads = [b"--x\r\nContent-Disposition: form-data; " + name + b"\r\n\r\n" + one + b"\r\n" for name, one in parts]
    return b"".join(heads) + b"--x--\r\n"


def test_what_an_archive_unpacks_to_counts_though_its_body_is_small(house: House) -> None:
    def send(count: int) -> Answer:
        content = form_of(house, bitmaps(count))
        assert len(content) < 100_000
        return asyncio.run(house.asked(content_length=str(len(content))).whole(content))

    first = send(4)
    assert first.status == 202, first.body
    assert used_up(send(4))
    assert not list(house.config.home.glob("incoming/*"))
    assert send(1).status == 202, "a smaller one fits"


def test_bodies_that_the_disk_cannot_take_together_are_refused_before_they_are_read(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, limits.SPARE_BYTES + 3 * MIB)

    async def two() -> Answer:
        first = asyncio.create_task(house.asked(content_length=str(2 * MIB)).of(halted()))
        while not house.coordinator.uploads._used:
            await asyncio.sleep(0.01)
        refused = await house.asked(1, content_length=str(2 * MIB)).of(never())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return refused

    refused = asyncio.run(two())
    assert (refused.status, refused.problem["type"]) == (507, "urn:labeler:problem:storage-full")
    assert asyncio.run(house.asked(1, content_length=str(2 * MIB)).whole(b"")).status == 422


def test_a_body_without_a_length_that_comes_in_crumbs_leaves_the_disk_its_spare_bytes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, limits.SPARE_BYTES + MIB)
    answer = asyncio.run(house.asked().of(crumbs(3 * MIB)))
    assert (answer.status, answer.problem["type"]) == (507, "urn:labeler:problem:storage-full")
    assert answer.taken <= MIB + 65536
    assert not house.coordinator.uploads._used
    set_free(monkeypatch, 0)
    made = house.job(6)
    assert made.status == 202, "a small one is taken while the journal has room"


def test_a_quota_below_one_jobs_upload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_token_bytes is 5, less than the 10 of one job"):
        LimitsTable(max_token_bytes=5, max_upload_bytes=10)


def test_a_quota_that_was_lowered_below_what_is_kept_refuses_what_is_new(house: House) -> None:
    house.coordinator.uploads.keep("job", house.coordinator.tokens.find(house.secrets[0]).token_id, 2 * QUOTA)  # type: ignore[union-attr]
    assert used_up(asyncio.run(house.asked(content_length="1").of(never())))
    assert house.coordinator.uploads._used.total() == 2 * QUOTA
