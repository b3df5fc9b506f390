"""docs/deploy.md, operate.md and containers.md: commands exist, sites are kept apart, the steps lead to labels."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from api.coordinator.config import read_config
from labeler.driver.mail_redis import RedisMailbox
from tests.e2e.place import EMBED, TALLIERS, Place, is_ready, place
from tests.processes import has_caddy, tcp_sockets, wait_until
from workers.digits import write_digits, zip_images
from workers.homes.new import make_coordinator_home
from workers.up.redis_server import _program

__all__ = ["place"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
OPERATE = (ROOT / "docs" / "operate.md").read_text()
BACKUP = (ROOT / "docs" / "backup.md").read_text()
CONTAINERS = (ROOT / "docs" / "containers.md").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
HOSPITALS = ("hospital-a", "hospital-b")
SITES = [f"hospital-{letter}" for letter in "abcde"] + [f"tallier-{number}" for number in range(3)]


# Compose and images


def test_a_site_shares_a_network_with_the_coordinator_and_talliers_one_with_each_other() -> None:
    services = COMPOSE["services"]

    def members(network: str) -> set[str]:
        assert COMPOSE["networks"][network] == {"internal": True}
        return {name for name, service in services.items() if network in service.get("networks", ())}

    for site in SITES:
        own, *shared = services[site]["networks"]
        assert members(own) == {site, "coordinator"}
        assert shared == (["winners"] if site.startswith("tallier") else [])
    assert members("winners") == {"tallier-0", "tallier-1", "tallier-2"}


def test_redis_has_a_socket_that_the_operators_own_share_and_neither_network_nor_port() -> None:
    services = COMPOSE["services"]
    assert services["redis"]["network_mode"] == "none"
    assert services["redis"].keys().isdisjoint({"networks", "ports", "command"})
    members = {name for name, one in services.items() if "redis:/run/labeler-redis" in one["volumes"]}
    assert members == {"redis", "coordinator", "embedder", "embedder-gpu"}
    assert [name for name, service in services.items() if "ports" in service] == ["coordinator"]
    image = (ROOT / "Dockerfile").read_text()
    assert re.search(r"--owner labeler --mode 0700 .*/run/labeler-redis", image)
    assert 'ENTRYPOINT ["redis-server", "/etc/labeler/redis.conf"]' in image


def test_the_operators_redis_opens_a_socket_of_mode_700_no_port_and_takes_what_the_coordinator_needs(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    make_coordinator_home(home)
    url = read_config(home / "coordinator.toml").redis_url
    text = (ROOT / "deploy" / "redis.conf").read_text()
    place = "/run/labeler-redis"
    assert url == f"unix://{place}/redis.sock"
    for shared in ("helm/labeler/templates/party.yaml", "systemd/labeler-redis.service"):
        assert place in (ROOT / "deploy" / shared).read_text()
    (tmp_path / "redis.conf").write_text(text.replace(place, str(tmp_path)))
    server = subprocess.Popen([_program(), str(tmp_path / "redis.conf")], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        opened = tmp_path / "redis.sock"
        wait_until(opened.exists)
        mailbox = RedisMailbox(url.replace(place, str(tmp_path)))
        mailbox.check()
        assert stat.S_IMODE(opened.stat().st_mode) == 0o700
        assert mailbox.is_guarded
        mailbox.close()
        assert tcp_sockets(server.pid) == []
    finally:
        server.kill()
        server.wait()


def test_every_service_keeps_its_home_in_a_volume_of_its_own_and_runs_without_privileges() -> None:
    homes = {}
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        if name != "redis":
            homes[name] = next(volume.split(":")[0] for volume in service["volumes"] if volume.endswith(":/data"))
            assert homes[name] in COMPOSE["volumes"]
    assert homes.pop("embedder") == homes.pop("embedder-gpu") == homes["coordinator"]
    assert len(set(homes.values())) == len(homes)


def test_every_role_has_an_image_of_its_own() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    built = {service["build"]["target"] for service in COMPOSE["services"].values()}
    assert built == {"coordinator", "embedder", "agent", "tallier", "redis"}
    assert built <= targets
    site = yaml.safe_load((ROOT / "deploy" / "site.compose.yaml").read_text())
    assert "ports" not in site["services"]["party"]


def test_a_gpu_is_a_profile_and_what_is_compiled_for_it_stays_in_a_volume() -> None:
    image = (ROOT / "Dockerfile").read_text()
    full = image.split("AS full\n")[1].split("\nFROM")[0]
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"ENV ((?:.*\\\n)*.*)", full))))
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert {environment[name].split("/")[1] for name in ("CUDA_CACHE_PATH", "HF_HOME", "XDG_CACHE_HOME")} == {"cache"}
    assert 'VOLUME ["/data", "/cache"]' in full
    assert "--owner labeler --mode 0700 /data /cache" in image
    assert re.search(r"^ARG BASE=python:3.11-slim", image, flags=re.MULTILINE)
    site = yaml.safe_load((ROOT / "deploy" / "site.compose.yaml").read_text())
    for compose, plain, with_gpu in ((COMPOSE, "embedder", "embedder-gpu"), (site, "party", "agent-gpu")):
        profile = dict(compose["services"][with_gpu])
        (device,) = profile.pop("deploy")["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert profile.pop("profiles") == ["gpu"]
        same = ({"image", "build"} if plain == "party" else set()) ^ profile.keys()
        assert {key: profile[key] for key in same} == {key: compose["services"][plain][key] for key in same}
        assert "profiles" not in compose["services"][plain]
        (cache,) = (volume.split(":")[0] for volume in profile["volumes"] if volume.endswith(":/cache"))
        assert cache in compose["volumes"]


def test_slim_images_leave_out_the_learning_libraries_and_nothing_else() -> None:
    path = ROOT / "deploy" / "requirements.py"
    spec = importlib.util.spec_from_file_location("requirements", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    full = module.requirements(ROOT / "pyproject.toml", is_slim=False)
    slim = module.requirements(ROOT / "pyproject.toml", is_slim=True)
    left_out = {re.split(r"[<>=; ]", one)[0] for one in set(full) - set(slim)}
    learning = {
        "torch",
        "torchvision",
        "timm",
        "onnx",
        "onnxruntime",
        "faiss-cpu",
        "faiss-gpu",
        "matplotlib",
    }
    assert left_out == learning


@pytest.mark.long
def test_the_roles_of_slim_images_start_where_there_is_no_learning_library() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "torch torchvision timm onnx onnxruntime faiss sklearn matplotlib".split():
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import workers.cli, workers.serve, workers.tallier.service
import workers.homes.new, workers.homes.journals, workers.homes.new
import api.app, api.server, api.coordinator.service
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# The page


def test_the_page_is_one_page() -> None:
    assert len(PAGE.split()) <= 1000


@pytest.mark.parametrize("page", [PAGE, OPERATE, BACKUP, CONTAINERS], ids=["deploy", "operate", "backup", "containers"])
def test_links_and_files_on_the_page_exist(page: str) -> None:
    for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page):
        assert not target or (ROOT / "docs" / target).exists(), target
        if target.endswith(".png"):
            continue
        text = (ROOT / "docs" / target).read_text() if target else page
        titles = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall("(?m)^#+ (.*)$", text)
        ]
        assert not section or section in titles, section
    for name in re.findall(r"(?<![\w/])((?:deploy|docs)/[\w.-]+\.\w+)", page):
        assert (ROOT / name).exists(), name


# The way through the page


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
@pytest.mark.skipif(not has_caddy(), reason="there is no caddy; install the extra `edge`")
def test_the_steps_of_the_page_lead_to_labels_over_tls(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    port = place.port
    subprocess.run([ROOT / "deploy" / "make-certificate.sh", "tls", "localhost", "127.0.0.1"], check=True)
    parts = write_digits(place.folder, seed=0, agents=5)
    zip_images(parts["public"], place.folder / "scans.zip", count=60)
    # 1. The operator
    url = f"https://localhost:{port}"
    token = place.make_coordinator(url)
    tls = ("--tls-cert", "tls/coordinator.pem", "--tls-key", "tls/coordinator.key")
    edge = ("--edge", "localhost", "--edge-port", port, "--port", "0")
    place.start("coordinator", "serve", "--home", "coordinator", *edge, *tls)
    place.start("embedder", "embedder", "--home", "coordinator")
    monkeypatch.setenv("LABELER_URL", url)
    monkeypatch.setenv("LABELER_TOKEN", token)
    monkeypatch.setenv("LABELER_CA_FILE", str(place.folder / "tls" / "ca.pem"))
    wait_until(lambda: is_listened_at(port), what="the coordinator")
    # 2. The talliers, then the hospitals
    for site in TALLIERS:
        place.join(site, "tallier")
        place.start(site, "tallier", "--home", site)
    for number, site in enumerate(HOSPITALS, 1):
        place.labeler("embed", parts[f"agent-{number}"], *EMBED, "--out", f"{site}.shard")
        place.join(site, "agent", "--shard", f"{site}.shard")
    # ... who are named before anything is summed, so the talliers are started again
    wait_until(lambda: is_ready("talliers"), what="the talliers")
    place.stop(*TALLIERS)
    for site in TALLIERS:
        place.labeler("tallier", "agents", *(f"{one}/keys.public.json" for one in HOSPITALS), "--home", site)
        place.start(f"{site} again", "tallier", "--home", site)
    for site in HOSPITALS:
        place.start(site, "agent", "--home", site)
    wait_until(is_ready, what="everybody")
    # 3. A first job, which waits for a person at each hospital
    (place.folder / "task.toml").write_text(
        '[task]\nname = "digits"\nmethod = "reverse-knn"\nk = 1\nepsilon = 0.5\ndelta = 1e-5\n'
        'colluding_agents = 1\n[queries]\nstrategy = "clustered"\ncount = 10\n'
    )
    job = place.document("submit", "scans.zip", "--task", "task.toml")
    for site in HOSPITALS:
        wait_until(lambda site=site: waits(place, site), what="the ask")
        place.labeler("agent", "approve", job["task_id"][:12], "--home", site)
    wait_until(lambda: place.document("status", job["job_id"])["state"] == "completed", what="the job")
    place.labeler("export", job["job_id"], "--out", "labels.parquet")
    assert pq.read_table("labels.parquet").num_rows == 60
    for site in HOSPITALS:
        found = place.document("agent", "budget", "--home", site)
        (budget,) = (one for one in found if one["level"] == "instance")
        assert 0.4 < budget["spent_epsilon"] < 0.6, "each hospital sees what it has spent"
    place.labeler("journal", "backup", "--home", "hospital-a", "--out", "backup")
    place.labeler("journal", "verify", "--home", "backup")


def waits(place: Place, site: str) -> bool:
    shown = place.run("agent", "waiting", "--home", site, "--json")
    return shown.code == 0 and bool(shown.document)


def is_listened_at(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
