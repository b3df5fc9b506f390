"""The pages for operators, the post of the parties, and a server that stops gently."""

from __future__ import annotations

import datetime
import http.server
import importlib.metadata
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client.parser import text_string_to_metric_families

from api import console as dashboard
from api import examples
from api.client import Client, ServiceBusy
from api.coordinator import stores
from api.server import listen
from labeler.errors import Unavailable
from labeler.messages import read_frames
from labeler.system.keys import PartyKeys
from tests import doors
from tests.api.routes.conftest import FINGERPRINT, ConfigOf, ServeIn, Service, eventually

ROOT = Path(__file__).parents[3]
OCTETS = {"Content-Type": "application/octet-stream"}


def test_the_process_is_alive_and_says_what_it_lacks(service: Service) -> None:
    with service.http("admin") as http:
        assert http.get("/healthz").json() == {"status": "alive"}
        ready = http.get("/readyz")
        assert ready.json()["version"] == importlib.metadata.version("private-labeler")
    assert ready.status_code == 503
    missing = {check["name"] for check in ready.json()["checks"] if not check["ok"]}
    assert missing
    assert "journal" not in missing


def test_a_party_is_listed_with_the_version_of_its_program_and_for_requesters_to_the_minute(service: Service) -> None:
    data = service.polling("tallier-1", 1, program="labeler/0.1-test", journal_seq=1, journal_hash="a" * 64)
    assert service.post(data, path="/v1/messages:poll").status_code == 200
    with service.http("viewer") as viewer:
        listed = {one["party_id"]: one["version"] for one in viewer.get("/v1/parties").json()["parties"]}
    assert listed["tallier-1"] == "labeler/0.1-test"
    assert listed["tallier-2"] == ""
    moments = []
    for role in ("admin", "requester"):
        with service.http(role) as http:
            parties = {one["party_id"]: one for one in http.get("/v1/parties").json()["parties"]}
        moments.append(datetime.datetime.fromisoformat(parties["tallier-1"]["last_contact"]))
    assert moments[1] == moments[0].replace(second=0, microsecond=0)


def test_metrics_say_what_was_asked_spent_and_taken(service: Service) -> None:
    with service.http("viewer") as viewer:
        viewer.get("/v1/jobs/job-none")
        text = viewer.get("/metrics").text
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }
    route = (("method", "GET"), ("route", "/v1/jobs/{job_id}"), ("status", "404"))
    assert samples["labeler_http_requests_total", route] >= 1
    assert samples["labeler_ledger_seq", ()] >= 1
    assert samples["labeler_parties_live", (("role", "agent"),)] >= 0
    for what in ("posted", "spent", "left", "cap"):
        assert (f"labeler_budget_{what}_epsilon", (("account", "federation"), ("level", "instance"))) in samples
    assert "job-none" not in text
    assert not any(name == "labeler_scrape_missing" for name, _ in samples)


@pytest.mark.parametrize(("path", "place"), [("/", "/dashboard"), ("/docs", "/api"), ("/redoc", "/api")])
def test_addresses_that_people_guess_lead_to_a_page(service: Service, path: str, place: str) -> None:
    with service.http(None) as http:
        answer = http.get(path)
        assert (answer.status_code, answer.headers["Location"]) == (307, place)
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert http.get(path, follow_redirects=True).headers["Content-Type"].startswith("text/html")


def test_the_dashboard_is_served_from_here_alone(service: Service) -> None:
    with service.http(None) as http:
        page = http.get("/dashboard")
        assert page.status_code == 200
        assert page.headers["Content-Type"].startswith("text/html")
        for name, value in dashboard.HEADERS.items():
            assert page.headers[name] == value
        assets = re.findall(r'(?:src|href)="(/dashboard/[^"#]+)"', page.text)
        assert assets
        for asset in assets:
            found = http.get(asset).headers
            assert found["X-Content-Type-Options"] == "nosniff", asset
            assert found["Content-Security-Policy"] == dashboard.HEADERS["Content-Security-Policy"], asset
        for wrong in ("../__init__.py", "%2e%2e/__init__.py", "none.js", "/etc/passwd", ""):
            assert http.get(f"/dashboard/{wrong}").status_code == 404, wrong


def test_a_party_asks_for_its_mail_and_a_stranger_gets_none(service: Service) -> None:
    with service.http(None) as http:
        response = service.post(service.polling("agent-a", 1), path="/v1/messages:poll")
        assert response.status_code == 200, response.text
        assert response.headers["Content-Type"] == OCTETS["Content-Type"]
        assert read_frames(response.content, max_messages=10)[0].header.recipient == "agent-a"

        forged = service.polling("agent-a", 2, keys=service.keys["agent-b"])
        response = service.post(forged, path="/v1/messages:poll")
        assert (response.status_code, response.json()["type"]) == (403, "urn:labeler:problem:forged")
        unknown = service.polling("nobody", 1, keys=PartyKeys.generate())
        response = service.post(unknown, path="/v1/messages:poll")
        assert (response.status_code, response.json()["type"]) == (403, "urn:labeler:problem:not-enrolled")
        for path in ("/v1/messages", "/v1/messages:poll"):
            response = http.post(path, content=b"\x00garbage" * 50, headers=OCTETS)
            assert response.status_code in (409, 413, 422), response.text
            assert http.post(path, content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
        large = b"x" * 1_100_000
        assert http.post("/v1/messages:poll", content=large, headers=OCTETS).status_code == 413


def test_no_answer_under_v1_may_be_stored(service: Service) -> None:
    def stored(answer: httpx2.Response) -> list[str]:
        return answer.headers.get_list("Cache-Control")

    with service.http("requester") as http, service.http(None) as stranger:
        job = http.post("/v1/jobs", json=service.vectors()).json()["job_id"]
        with http.stream("GET", f"/v1/jobs/{job}/events") as stream:
            found = [stored(stream)]  # type: ignore[arg-type]
        for method, path in (
            ("GET", f"/v1/jobs/{job}"), ("HEAD", "/v1/whoami"), ("GET", "/v1/jobs/none"), ("PUT", "/v1/jobs"),
            ("GET", "/v1/none"), ("GET", "/v1"), ("GET", f"/v1/jobs/{job}/labels"), ("POST", "/v1/jobs"),
            ("POST", "/v1/messages"), ("GET", "/v1/budget?x=1"),
        ):  # fmt: skip
            found += [stored(one.request(method, path)) for one in (http, stranger)]
    assert found == [["no-store"]] * len(found)


def test_streams_and_polls_end_when_the_server_stops(
    serve_in: ServeIn, config_of: ConfigOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.GRACE_S", 120)
    ended: list[tuple[str, float]] = []
    with serve_in(config_of(tmp_path / "home")) as service:
        with Client(service.url, service.tokens["requester"]) as client:
            features = [[1.0] + [0.0] * 7]
            job = client.submit(service.task().task_id, features=features, backbone_fingerprint=FINGERPRINT)

        told = threading.Event()

        def watch() -> None:
            with service.http("viewer") as http, http.stream("GET", f"/v1/jobs/{job.job_id}/events") as stream:
                lines = stream.iter_lines()
                assert next(lines) == "event: job"
                told.set()
                assert list(lines)
            ended.append(("stream", time.monotonic()))

        def poll() -> None:
            # Nobody sends a tallier anything before agents have agreed, so it is held.
            response = service.post(service.polling("tallier-0", 1, wait_s=30), path="/v1/messages:poll")
            assert response.status_code in (200, 503)
            ended.append(("poll", time.monotonic()))

        threads = [threading.Thread(target=watch), threading.Thread(target=poll)]
        for thread in threads:
            thread.start()
        assert told.wait(240)
        parties = service.coordinator.stores.parties
        eventually(lambda: parties.get("tallier-0").last_contact is not None)
        stopped = time.monotonic()
    for thread in threads:
        thread.join(240)
    assert {name for name, _ in ended} == {"stream", "poll"}
    assert max(at for _, at in ended) - stopped < 29  # polls are held for 30


@pytest.mark.process
def test_a_signal_stops_the_server_and_the_process_ends_well(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of(tmp_path / "home")
    code = (
        "import sys, pathlib\n"
        "from api.coordinator.config import CoordinatorConfig\n"
        "from api.coordinator.service import Coordinator\n"
        "from api.logs import configure_logging\n"
        "from api.server import listen, serve_at\n"
        "configure_logging()\n"
        "config = CoordinatorConfig.model_validate_json(sys.stdin.read())\n"
        "with listen('127.0.0.1', 0) as listening:\n"
        "    serve_at(listening, Coordinator.open(config), on_ready=lambda url: print(url, flush=True))\n"
        "print('stopped', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(config.model_dump_json())
        process.stdin.close()
        url = process.stdout.readline().strip()
        assert httpx2.get(f"{url}/healthz", trust_env=False, timeout=240).status_code == 200
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        logged = process.stderr.read()
        assert process.wait(240) == 0, logged
    assert rest.strip() == "stopped"
    assert '"route": "/healthz"' in logged
    assert "Traceback" not in logged


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, doors.HOST)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(doors.HOST))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = (tmp_path / "cert.pem", tmp_path / "key.pem")
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


class _WhoAmI(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(examples.TOKEN).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_client_checks_the_certificate_of_its_service(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    class Encrypted(_WhoAmI):
        def setup(self) -> None:
            self.request = context.wrap_socket(self.request, server_side=True)
            super().setup()

        def finish(self) -> None:
            super().finish()
            self.request.close()

    with doors.opened(partial(doors.handle, Encrypted)) as number:
        url = f"https://{doors.HOST}:{number}"
        with Client(url, "t", ca_file=certificate[0]) as client:
            assert client.whoami().token_id == examples.TOKEN_ID
        with Client(url, "t", patience_s=0) as stranger, pytest.raises(ServiceBusy, match="is not trusted"):
            stranger.whoami()


@pytest.mark.process
def test_an_address_that_is_taken_is_refused_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Unavailable, match="another port"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_what_was_found_is_told_again_for_a_moment_so_that_asking_often_is_no_work(
    tmp_path: Path, service: Service
) -> None:
    now = [0.0]
    journal = service.coordinator.stores.database
    before = journal.probe()
    probe = stores.RoomProbe(tmp_path, journal, now=lambda: now[0])
    for _ in range(50):
        probe.check()
    assert journal.probe() == before + 2
    now[0] = stores.TOLD_AGAIN_S
    probe.check()
    assert journal.probe() == before + 4
    assert list(tmp_path.iterdir()) == []
