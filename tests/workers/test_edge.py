"""The edge's configuration, and who may be reached without one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import CoordinatorConfig
from api.server import KEEP_ALIVE_S
from labeler.caps import CapsTable
from labeler.errors import InvalidSetting
from tests.processes import has_caddy
from workers.serve import UPSTREAM_KEEP_ALIVE_S, Edge, caddyfile, program, refuse_open_doors

CADDY = pytest.mark.skipif(not has_caddy(), reason="there is no caddy; install the extra `edge`")


def written(edge: Edge, folder: Path) -> str:
    return caddyfile(edge, "127.0.0.1:8080", folder=folder, max_stranger_bytes=16_384, max_bytes=10**9)


def adapted(edge: Edge, folder: Path) -> dict[str, Any]:
    """What caddy understands."""
    path = folder / "Caddyfile"
    path.write_text(written(edge, folder))
    command = ["caddy", "adapt", "--adapter", "caddyfile", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"HOME": str(folder)} | PATH)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


PATH = {"PATH": str(Path(program()).parent) if has_caddy() else ""}


@CADDY
@pytest.mark.parametrize(
    "edge",
    [
        Edge("labels.example.org"),
        Edge("labels.example.org", 8443, tls_files=(Path("/etc/a b.pem"), Path("/etc/k.pem"))),
        Edge("localhost", 8443, "internal"),
        Edge("localhost", 8443, "off"),
    ],
    ids=["acme", "files", "internal", "off"],
)
@pytest.mark.process
def test_caddy_understands_every_bound_as_it_is_meant(edge: Edge, tmp_path: Path) -> None:
    found = adapted(edge, tmp_path)
    (server,) = found["apps"]["http"]["servers"].values()
    assert server["read_header_timeout"] == 10 * 10**9
    assert server["read_timeout"] == 30 * 60 * 10**9
    assert server["read_idle_timeout"] == -(10**9), "else a slow body never ends"
    assert server["write_idle_timeout"] == 60 * 10**9, "a client that does not read is cut off"
    assert server["idle_timeout"] == 75 * 10**9
    assert server["max_header_bytes"] == 16_000
    assert server["strict_sni_host"] is True
    assert server["listen"] == [f"127.0.0.1:{edge.port}" if edge.is_plain else f":{edge.port}"]
    ours, others = server["routes"]
    assert ours["match"] == [{"host": [edge.domain]}]
    assert "match" not in others
    assert others["handle"][0]["routes"][0]["handle"] == [{"handler": "static_response", "abort": True}]
    strangers, rest, to_strangers, to_rest = ours["handle"][0]["routes"]
    assert strangers == {
        "match": [{"path": ["/v1/enrolments"]}],
        "handle": [{"handler": "request_body", "max_size": 16_384}],
    }
    assert rest["handle"] == [{"handler": "request_body", "max_size": 10**9}]
    assert to_strangers["handle"][0]["request_buffers"] == 16_384
    proxy = to_rest["handle"][0]
    assert proxy["upstreams"] == [{"dial": "127.0.0.1:8080"}]
    assert proxy["flush_interval"] == -1
    assert proxy["transport"]["keep_alive"]["idle_timeout"] == UPSTREAM_KEEP_ALIVE_S * 10**9
    assert found["admin"] == {"disabled": True, "config": {"persist": False}}
    assert found["storage"]["root"] == str(tmp_path / "kept")
    if edge.is_plain:
        assert server["automatic_https"]["disable"] is True
    else:
        assert "disable" not in server["automatic_https"]
        assert server["automatic_https"]["disable_redirects"] is True
    issuers = [one["issuers"] for one in found["apps"].get("tls", {}).get("automation", {}).get("policies", ())]
    assert issuers == ([[{"module": "internal"}]] if edge.certificates == "internal" else [])
    files = found["apps"].get("tls", {}).get("certificates", {}).get("load_files", [])
    assert [(one["certificate"], one["key"]) for one in files] == (
        [] if edge.tls_files is None else [tuple(map(str, edge.tls_files))]
    )


@pytest.mark.parametrize(
    ("edge", "is_told"),
    [(Edge("a.example"), True), (Edge("localhost", 8443, "internal"), True), (Edge("localhost", 80, "off"), False)],
)
def test_browsers_are_told_to_come_by_https_alone_where_there_is_https(
    edge: Edge, is_told: bool, tmp_path: Path
) -> None:
    text = written(edge, tmp_path)
    assert text.count('header_down Strict-Transport-Security "max-age=31536000"') == 2 * is_told


def test_the_coordinator_keeps_connections_longer_than_its_edge() -> None:
    assert KEEP_ALIVE_S > UPSTREAM_KEEP_ALIVE_S


@pytest.mark.parametrize(
    "edge",
    [
        Edge("a.example {"),
        Edge("a.example\nb"),
        Edge("https://a.example"),
        Edge(""),
        Edge("a.example,"),
        Edge("labels.example.org", certificates="off"),
        Edge("localhost,labels.example.org", certificates="off"),
        Edge("a.example", tls_files=(Path('/tmp/"; import x'), Path("/tmp/k"))),
    ],
)
def test_what_would_mean_something_else_to_caddy_or_leave_this_machine_in_clear_is_refused(
    edge: Edge, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting):
        written(edge, tmp_path)


def test_several_names_lead_to_one_coordinator(tmp_path: Path) -> None:
    edge = Edge("coordinator,localhost", 8443, "internal")
    assert "https://coordinator:8443, https://localhost:8443 {" in written(edge, tmp_path)
    assert edge.url == "https://coordinator:8443"


@pytest.mark.parametrize(
    ("host", "edge", "behind", "proxies", "words"),
    [
        ("0.0.0.0", None, False, (), "--edge DOMAIN, or --behind-proxy"),
        ("::", None, False, ("10.0.0.1",), "--edge DOMAIN, or --behind-proxy"),
        ("labels.example.org", None, False, (), "--edge DOMAIN, or --behind-proxy"),
        ("0.0.0.0", None, True, (), "trusted_proxies"),
        ("127.0.0.1", None, True, (), "trusted_proxies"),
        ("0.0.0.0", Edge("a.example"), False, (), "only on this machine"),
        ("127.0.0.1", Edge("a.example"), True, ("10.0.0.1",), "not both"),
        ("127.0.0.1", None, False, (), ""),
        ("::1", None, False, (), ""),
        ("127.0.0.1", Edge("a.example"), False, (), ""),
        ("0.0.0.0", None, True, ("10.0.0.1",), ""),
    ],
)
def test_nobody_serves_other_machines_without_something_in_front(
    tmp_path: Path, host: str, edge: Edge | None, behind: bool, proxies: tuple[str, ...], words: str
) -> None:
    caps = CapsTable(instance_epsilon=1.0, agent_epsilon=1.0)
    settings = CoordinatorConfig(
        home=tmp_path,
        redis_url="redis://127.0.0.1",
        public_url="https://a.example",
        federation=caps,
        agents=caps,
        trusted_proxies=proxies,
    )
    if not words:
        refuse_open_doors(host, settings, edge=edge, is_behind_proxy=behind)
        return
    with pytest.raises(InvalidSetting, match=words):
        refuse_open_doors(host, settings, edge=edge, is_behind_proxy=behind)
