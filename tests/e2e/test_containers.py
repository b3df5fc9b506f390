"""The images are built and the five sites of compose.yaml run, by Debian's podman, without any image registry.

Needs root, podman, runc and debootstrap, a Debian mirror and a package index, and 30 GB; skips with a reason without
them. LABELER_CONTAINERS names a folder in which base and layers stay between runs; without it everything is made in a
temporary one and removed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from feature_store.backbones import load_backbone
from tests.e2e.place import free_port, is_ready
from tests.processes import wait_until
from workers.digits import write_digits, zip_images

ROOT = Path(__file__).parents[2]
TARGETS = ("redis", "coordinator", "tallier", "agent", "embedder")
SITES = [f"hospital-{letter}" for letter in "abcde"]
TALLIERS = [f"tallier-{number}" for number in range(3)]
MIRROR = "http://deb.debian.org/debian"
SPACE_GB = 30
BASE = "localhost/debian:12"
ADMIN = ("--name", "admin", "--role", "admin", "--json")
WAITING = ("labeler", "agent", "waiting", "--home", "/data", "--json")

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]


class Podman:
    """Debian's podman with a store of its own in one folder.

    Attributes:
        environment: of every command, and of podman-compose.
    """

    def __init__(self, folder: Path) -> None:
        store = {"driver": "overlay", "graphroot": str(folder / "store"), "runroot": str(folder / "run")}
        (folder / "storage.conf").write_text("[storage]\n" + "".join(f'{k} = "{v}"\n' for k, v in store.items()))
        (folder / "containers.conf").write_text(
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            '[containers]\ndefault_ulimits = ["nofile=10000:10000", "nproc=10000:10000"]\nlog_driver = "k8s-file"\n'
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{folder / "networks"}"\n'
        )
        self.environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def __call__(self, *arguments: str, timeout_s: float = 120, **options: Any) -> str:
        done = subprocess.run(
            ["podman", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )
        assert done.returncode == 0, f"podman {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def build(self, target: str) -> None:
        """Build one role's image, with this machine's certificates and settings for its package index."""
        passed = ["--env=SSL_CERT_FILE", "--env=PIP_CERT"]
        for path in ("/etc/ssl/certs", "/etc/pip.conf"):
            if Path(path).exists():
                passed.append(f"--volume={path}:{path}:ro")
        build = ("build", "--isolation=chroot", "--network=host", f"--build-arg=BASE={BASE}")
        self(*build, *passed, "--target", target, "--tag", f"private-labeler:{target}", str(ROOT), timeout_s=2400)

    def layers(self, target: str) -> list[str]:
        (image,) = json.loads(self("image", "inspect", f"private-labeler:{target}"))
        layers: list[str] = image["RootFS"]["Layers"]
        return layers


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A podman with the image of every role."""
    if os.geteuid() != 0:
        pytest.skip("containers are built and run by root here")
    for program in ("podman", "runc", "debootstrap", "openssl", "aardvark-dns"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/lib/podman:/usr/sbin") is None:
            pytest.skip(f"there is no {program} on this machine")
    pytest.importorskip("podman_compose", reason="podman-compose is in the extra `containers`")
    kept = os.environ.get("LABELER_CONTAINERS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("containers")
    folder.mkdir(parents=True, exist_ok=True)
    if not kept and shutil.disk_usage(folder).free < SPACE_GB * 10**9:
        pytest.skip(f"images and layers need {SPACE_GB} GB")
    podman = Podman(folder)
    if not podman("images", "--quiet", "--filter", f"reference={BASE}").strip():
        _make_base(podman, folder / "base")
    for target in TARGETS:
        began = time.monotonic()
        podman.build(target)
        sys.stdout.write(f"{target}: {time.monotonic() - began:.0f} s\n")
    yield podman
    podman("rm", "--all", "--force", "--time", "5")
    podman("volume", "rm", "--all", "--force")
    if not kept:
        _reset(podman)


def _reset(podman: Podman, *, tries: int = 5) -> None:
    """Remove the store; again where monitors of the last containers still write their events into what is removed."""
    for left in reversed(range(tries)):
        try:
            podman("system", "reset", "--force", timeout_s=600)
        except AssertionError:
            if not left:
                raise
            time.sleep(2)
        else:
            return


def _make_base(podman: Podman, folder: Path) -> None:
    """Debian's minimal base from its own mirror, without a registry of images."""
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(folder), MIRROR],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"debootstrap could not make a base: {made.stdout[-200:]}")
    archive = folder.with_suffix(".tar")
    with tarfile.open(archive, "w") as packed:
        packed.add(folder, arcname=".")
    podman("import", str(archive), BASE)
    archive.unlink()
    shutil.rmtree(folder)


# Images


def test_coordinator_and_talliers_are_small_and_the_others_share_one_copy_of_torch(podman: Podman) -> None:
    listed = json.loads(podman("images", "--format", "json"))
    size = {name.split(":")[-1]: image["Size"] for image in listed for name in image.get("Names") or []}
    for target in TARGETS:
        sys.stdout.write(f"{target}: {size[target] / 1e9:.2f} GB\n")
    assert size["coordinator"] < 1.2e9
    assert size["tallier"] < 1.2e9
    assert size["agent"] < 9e9
    shared = podman.layers("agent")
    assert shared[-1:] != []
    assert podman.layers("embedder")[: len(shared) - 1] == shared[:-1]
    assert podman.layers("tallier")[:-1] == podman.layers("coordinator")[:-1]


def test_no_role_runs_as_root_or_can_change_its_own_program(podman: Podman) -> None:
    for target in TARGETS:
        run = ("run", "--rm", "--entrypoint", "sh", f"private-labeler:{target}", "-c")
        assert podman(*run, "id -u").strip() in {"1000"}
        assert podman(*run, "test -w /opt/labeler && echo writable || echo fixed").strip() == "fixed"


def test_the_image_of_an_agent_computes_and_that_of_a_coordinator_prices(podman: Podman) -> None:
    code = "import faiss, torch; print((torch.ones(2, 2) @ torch.ones(2, 2)).sum().item(), faiss.IndexFlatIP(2).d)"
    assert podman("run", "--rm", "--entrypoint", "python", "private-labeler:agent", "-c", code).split() == ["8.0", "2"]
    plan = "plan --method reverse-knn --queries 20 --epsilon 0.5 --delta 1e-5 --agents 3 --solve sigma --json"
    price = json.loads(podman("run", "--rm", "private-labeler:coordinator", *plan.split()))
    assert 0.49 < price["instance"]["epsilon"] <= 0.5


# The five sites


class Sites:
    """The services of compose.yaml in a folder of their own, driven as docs/containers.md says."""

    def __init__(self, podman: Podman, folder: Path, port: int) -> None:
        shutil.copy(ROOT / "compose.yaml", folder)
        (folder / "deploy" / "sent").mkdir(parents=True)
        names = ("coordinator", "localhost", "127.0.0.1")
        subprocess.run([ROOT / "deploy" / "make-certificate.sh", folder / "deploy" / "tls", *names], check=True)
        os.chown(folder / "deploy" / "tls" / "coordinator.key", 1000, 1000)
        self._folder = folder
        self._podman = podman
        self._environment = {**podman.environment, "LABELER_PORT": str(port)}
        self.sent = folder / "deploy" / "sent"

    def compose(self, *arguments: str, text: str | None = None) -> str:
        """podman-compose; without a systemd nobody would ask whether a service is healthy, so nobody waits for it."""
        done = subprocess.run(
            [Path(sys.executable).with_name("podman-compose"), *arguments],
            cwd=self._folder,
            env=self._environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def once(self, service: str, *command: str, entrypoint: str = "", text: str | None = None) -> str:
        """Run one command in a new container of a service."""
        chosen = ("--entrypoint", entrypoint) if entrypoint else ()
        return self.compose("run", "--rm", "--no-deps", "-T", *chosen, service, *command, text=text)

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the running container of a service."""
        name = f"private-labeler_{service}_1"
        return subprocess.run(
            ["podman", "exec", name, *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def up(self, *services: str) -> None:
        self.compose("up", "--detach", "--no-deps", *services)


@pytest.fixture
def sites(podman: Podman, tmp_path: Path) -> Iterator[Sites]:
    sites = Sites(podman, tmp_path, free_port())
    yield sites
    sites.compose("down", "--volumes", "--timeout", "5")


def test_five_sites_in_containers_join_by_invitation_and_label_photos_while_one_is_killed(
    sites: Sites, labeler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = write_digits(tmp_path, seed=0, agents=5)
    zip_images(parts["public"], tmp_path / "scans.zip", count=40)
    # The operator
    sites.once("coordinator", "serve", "--home", "/data", "--init")
    settings = sites.once("coordinator", "-c", "cat /data/coordinator.toml", entrypoint="sh")
    known = f'[backbones]\n{load_backbone("pixels:8").fingerprint} = "pixels:8"'
    settings = settings.replace("https://labels.example.org", "https://coordinator:8443").replace("[backbones]", known)
    sites.once("coordinator", "-c", "cat > /data/coordinator.toml", entrypoint="sh", text=settings)
    token = sites.once("coordinator", "keys", "token", "--home", "/data", *ADMIN)
    sites.up("redis", "coordinator", "embedder")
    port = sites._environment["LABELER_PORT"]
    monkeypatch.setenv("LABELER_URL", f"https://localhost:{port}")
    monkeypatch.setenv("LABELER_TOKEN", json.loads(token.splitlines()[-1])["token"])
    monkeypatch.setenv("LABELER_CA_FILE", str(tmp_path / "deploy" / "tls" / "ca.pem"))
    wait_until(lambda: labeler("status", "--json").code == 0, what="the coordinator")
    # Everybody joins
    for site in (*TALLIERS, *SITES):
        role = "tallier" if site in TALLIERS else "agent"
        made = labeler("invite", site, "--role", role, "--out", sites.sent / f"{site}.invitation.json", "--json")
        assert made.code == 0, made.err
        (sites.sent / f"{site}.invitation.json").chmod(0o644)
        join = [role, "join", f"/sent/{site}.invitation.json", "--home", "/data"]
        join += ["--phrase", json.loads(made.out)["phrase"], "--json"]
        if role == "agent":
            number = SITES.index(site) + 1
            shutil.copy(parts[f"agent-{number}"], sites.sent / f"{site}.parquet")
            backbone = ("--backbone", "pixels:8", "--classes", ",".join("0123456789"), "--max-records", "2000")
            sites.once(site, "embed", f"/sent/{site}.parquet", *backbone, "--out", "/data/a.shard")
            join += ["--shard", "/data/a.shard", "--noise-contributors", "4"]
        sites.once(site, *join)
    sites.up(*TALLIERS, *SITES)
    wait_until(is_ready, what="everybody")
    # Nobody reaches what is not theirs
    for site, other in (("hospital-a", "hospital-b"), ("hospital-a", "redis"), ("tallier-0", "hospital-a")):
        found = sites.inside(site, "python", "-c", f"import socket; socket.getaddrinfo('{other}', 1)")
        assert found.returncode != 0, f"{site} finds {other}"
    # A job that every hospital approves
    (tmp_path / "task.toml").write_text(
        '[task]\nname = "digits"\nmethod = "reverse-knn"\nk = 1\nepsilon = 0.5\ndelta = 1e-5\nmax_dropouts = 1\n'
        '[queries]\nstrategy = "clustered"\ncount = 10\n'
    )
    job = submit(labeler)
    approve(sites, job, SITES)
    labels_of(labeler, job, tmp_path / "first.parquet")
    # One is killed, and the others go on
    sites._podman("kill", "private-labeler_hospital-c_1")
    job = submit(labeler)
    approve(sites, job, [site for site in SITES if site != "hospital-c"])
    labels_of(labeler, job, tmp_path / "second.parquet")


def approve(sites: Sites, job: Any, at: Sequence[str]) -> None:
    """An approval covers one job's price, so each job is approved at each hospital."""
    for site in at:
        wait_until(lambda site=site: json.loads(sites.inside(site, *WAITING).stdout or "[]"), what=f"the ask at {site}")
        approved = sites.inside(site, "labeler", "agent", "approve", job["task_id"][:12], "--home", "/data")
        assert approved.returncode == 0, approved.stderr


def submit(labeler: Callable[..., Any]) -> Any:
    submitted = labeler("submit", "scans.zip", "--task", "task.toml", "--json")
    assert submitted.code == 0, submitted.err
    return json.loads(submitted.out)


def labels_of(labeler: Callable[..., Any], job: Any, out: Path) -> None:
    state = lambda: json.loads(labeler("status", job["job_id"], "--json").out)["state"]  # noqa: E731
    wait_until(lambda: state() not in {"queued", "collecting", "tallying"}, what="the job", seconds=300)
    assert state() == "completed"
    assert labeler("export", job["job_id"], "--out", out).code == 0
    assert pq.read_table(out).num_rows in {10, 40}
