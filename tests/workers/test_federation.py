"""A local federation in a folder: complete, private, made once, and reopened as it was."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from sklearn import datasets

from api.coordinator.config import read_config
from api.server import listen
from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting, LabelerError, MixedShards
from labeler.ledger.database import open_database
from labeler.ledger.parties import PartyStore
from labeler.system.keys import PartyKeys
from workers.agent.policy import read_policy
from workers.digits import DIGITS, load_digits
from workers.embedder.shards import embed_images
from workers.party.home import read_agent_config, read_tallier_config
from workers.up import FederationPlan
from workers.up import home as home_module
from workers.up.home import LocalFederation, make_federation, prepare_journal
from workers.up.supervisor import Death
from workers.up.up import Running, _Run, _usable_port, run_up

URL, REDIS = "http://127.0.0.1:1234", "unix:///somewhere/redis.sock?db=0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> LocalFederation:
    home = tmp_path_factory.mktemp("up") / "federation"
    home.mkdir(mode=0o700)
    return make_federation(home, FederationPlan(agents=2, instance_epsilon=3.0))


def test_everybody_has_a_home_with_keys_of_their_own(made: LocalFederation) -> None:
    homes = [made.coordinator, *made.agents.values(), *made.talliers.values()]
    keys = {PartyKeys.load(home / "keys.json").public.verify_key for home in homes}
    assert list(made.agents) == ["agent-1", "agent-2"]
    assert list(made.talliers) == ["tallier-0", "tallier-1", "tallier-2"]
    assert len(keys) == len(homes)
    for home in (made.home, *homes):
        assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.process
def test_every_settings_file_is_one_that_its_reader_takes(made: LocalFederation) -> None:
    made.set_addresses(url=URL, redis_url=REDIS)
    config = read_config(made.coordinator / "coordinator.toml")
    assert (config.public_url, config.redis_url) == (URL, REDIS)
    assert config.federation.instance_epsilon == config.agents.instance_epsilon == 3.0
    assert config.federation.agent_epsilon == "unlimited"
    coordinator = PartyKeys.load(made.coordinator / "keys.json").public
    for name, home in made.agents.items():
        agent = read_agent_config(home)
        assert (agent.agent_id, agent.coordinator_url) == (name, URL)
        policy = read_policy(home / "policy.toml")
        assert policy.coordinator.verify_key == coordinator.verify_key
        assert policy.budget.instance_epsilon == 3.0
        assert policy.allow.tasks == "any"
        assert not policy.allow.approval
    for number, (name, home) in enumerate(made.talliers.items()):
        tallier = read_tallier_config(home)
        assert (tallier.tallier_id, tallier.coordinator_url) == (name, URL)
        assert tallier.coordinator_seal_key == coordinator.seal_key
        assert policy.talliers[f"tallier-{number}"] == PartyKeys.load(home / "keys.json").public.seal_key


@pytest.mark.process
def test_reopening_changes_nothing_and_keeps_what_a_person_has_written(made: LocalFederation) -> None:
    policy = made.agents["agent-1"] / "policy.toml"
    policy.write_text(policy.read_text().replace("approval = false", "approval = true  # ours"))
    keys = (made.agents["agent-1"] / "keys.json").read_bytes()
    again = make_federation(made.home, FederationPlan())
    again.set_addresses(url="http://127.0.0.1:9", redis_url=REDIS)
    assert again.agents == made.agents
    assert "# ours" in policy.read_text()
    assert (made.agents["agent-1"] / "keys.json").read_bytes() == keys
    assert read_agent_config(made.agents["agent-2"]).coordinator_url == "http://127.0.0.1:9"
    assert "docs/coordinator.md" in (made.coordinator / "coordinator.toml").read_text()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (FederationPlan(agents=3), "has 2 agents, not 3"),
        (FederationPlan(backbone="pixels:4"), "--backbone is fixed"),
        (FederationPlan(instance_epsilon=1.0), "--instance-epsilon is fixed"),
        (FederationPlan(shards=(Path("a"),)), "--shard is fixed"),
    ],
)
def test_what_was_settled_when_it_was_made_cannot_be_changed_by_the_way(
    made: LocalFederation, plan: FederationPlan, words: str
) -> None:
    with pytest.raises(InvalidSetting, match=words):
        make_federation(made.home, plan)
    assert make_federation(made.home, FederationPlan(agents=2)).agents == made.agents


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BadData, match=r"thesis\.tex"):
        make_federation(tmp_path, FederationPlan())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_making_it_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = home_module._make_homes

    def interrupted(*arguments: Any, **more: Any) -> None:
        whole(*arguments, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(home_module, "_make_homes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_federation(tmp_path, FederationPlan(agents=1))
    keys = (tmp_path / "agents" / "agent-1" / "keys.json").read_bytes()
    ids = Shard.open(tmp_path / "agents" / "agent-1" / "images.shard").record_ids.tolist()
    monkeypatch.undo()
    federation = make_federation(tmp_path, FederationPlan(agents=1))
    assert (federation.agents["agent-1"] / "keys.json").read_bytes() == keys
    assert Shard.open(federation.agents["agent-1"] / "images.shard").record_ids.tolist() == ids


def test_shards_somebody_brings_stay_where_they_are(tmp_path: Path, federation_images: tuple[Path, Path]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    federation = make_federation(home, FederationPlan(shards=federation_images))
    assert federation.examples is None
    shards = [read_agent_config(path).shard for path in federation.agents.values()]
    assert shards == [str(path) for path in federation_images]
    assert read_config(federation.coordinator / "coordinator.toml").classes == ("no", "yes")


def test_shards_that_do_not_belong_together_are_refused(
    tmp_path: Path, federation_images: tuple[Path, Path], images: Path
) -> None:
    embed_images(
        images, "pixels:4", tmp_path / "other.shard", classes=("no", "yes"), duplicates="keep-all", max_records=100
    )
    embed_images(images, "pixels:8", tmp_path / "public.shard", classes=("no", "yes"), public=True)
    (home := tmp_path / "home").mkdir()
    with pytest.raises(MixedShards, match="differ in backbone"):
        make_federation(home, FederationPlan(shards=(federation_images[0], tmp_path / "other.shard")))
    with pytest.raises(MixedShards, match="not by the named"):
        make_federation(home, FederationPlan(shards=federation_images, backbone="pixels:4"))
    with pytest.raises(InvalidSetting, match="public shard"):
        make_federation(home, FederationPlan(shards=(tmp_path / "public.shard",)))
    with pytest.raises(InvalidSetting, match="named twice"):
        make_federation(home, FederationPlan(shards=(federation_images[0], federation_images[0])))
    with pytest.raises(InvalidSetting, match="3 agents and 2 shards"):
        make_federation(home, FederationPlan(agents=3, shards=federation_images))
    assert not (home / "federation.json").exists()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small gray images in two class folders."""
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    for number in range(12):
        path = root / ("yes" if number % 2 else "no") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), color=20 * number).save(path)
    return root


@pytest.fixture(scope="module")
def federation_images(tmp_path_factory: pytest.TempPathFactory, images: Path) -> tuple[Path, Path]:
    """Two private shards that belong together."""
    root = tmp_path_factory.mktemp("shards")
    for name in ("a", "b"):
        embed_images(
            images, "pixels:8", root / f"{name}.shard", classes=("no", "yes"), duplicates="keep-all", max_records=100
        )
    return root / "a.shard", root / "b.shard"


def test_epsilons_that_do_not_go_together_are_refused_in_a_sentence_before_a_home_is_made(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    for plan, said in (
        (FederationPlan(life_epsilon=0.0), "life_epsilon"),
        (FederationPlan(life_epsilon=5.0, instance_epsilon=1.0), "cannot be larger"),
        (FederationPlan(life_epsilon=50.0, instance_epsilon=60.0), "never given back"),
    ):
        with pytest.raises(InvalidSetting, match=said):
            make_federation(tmp_path / "home", plan)
        assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.process
def test_a_start_that_is_refused_leaves_no_empty_home_behind(tmp_path: Path, has_more: bool) -> None:
    """Refused after folders were made, and before: nothing of a home stays, and nothing that was there goes."""
    for number, plan in enumerate(
        (FederationPlan(instance_epsilon=1.0, life_epsilon=5.0), FederationPlan(shards=(tmp_path / "none",)))
    ):
        home = tmp_path / f"new-{number}" / "deep" / "home"
        if has_more:
            home.mkdir(parents=True)
        with pytest.raises(LabelerError):
            run_up(home, plan, port=0, stop=threading.Event(), on_ready=lambda _: None, complain=lambda _: None)
        assert home.exists() == has_more
        assert home.parents[1].exists() == has_more


# Before its coordinator starts


def states_of(federation: LocalFederation) -> dict[str, tuple[str, int | None, str, str]]:
    with closing(open_database(federation.coordinator / "journal.db", read_only=True)) as database:
        found = PartyStore(database).list()
    return {one.party_id: (one.role, one.tallier, one.state, one.verify_key) for one in found}


def test_everybody_is_enrolled_once_and_no_start_takes_other_keys_or_brings_back_who_was_revoked(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    federation = make_federation(tmp_path, FederationPlan(agents=2))
    homes = federation.talliers | federation.agents
    keys = {name: PartyKeys.load(home / "keys.json").public.verify_key for name, home in homes.items()}
    agents = {name: ("agent", None, "active", keys[name]) for name in federation.agents}
    everybody = agents | {
        name: ("tallier", number, "active", keys[name]) for number, name in enumerate(federation.talliers)
    }
    for _ in range(2):
        prepare_journal(federation)
        assert states_of(federation) == everybody
    with closing(open_database(federation.coordinator / "journal.db")) as database:
        PartyStore(database).revoke("agent-2")
    prepare_journal(federation)
    assert states_of(federation)["agent-2"][2] == "revoked"
    path = federation.agents["agent-1"] / "keys.json"
    path.unlink()
    with pytest.raises(InvalidSetting, match=r"agent-1: key file 'keys\.json' cannot be read"):
        prepare_journal(federation)
    PartyKeys.generate().save(path)
    with pytest.raises(BadData, match="agent-1 cannot be enrolled: 'agent-1' is enrolled already"):
        prepare_journal(federation)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a bound port cannot be listened at")
@pytest.mark.process
def test_the_port_it_chose_is_given_to_nobody_else_until_its_coordinator_listens_there() -> None:
    """Seconds later, in which a program that asked for any free port was given the same one."""
    with _usable_port(0) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # and again where the coordinator is started again
            with listen("127.0.0.1", port) as listening:
                assert listening.getsockname()[1] == port
                with pytest.raises(InvalidSetting, match=f"port {port} cannot be used"), _usable_port(port):
                    pass


# What it tells while it starts and runs


def test_a_full_disk_does_not_end_it_where_somebody_dies(
    made: LocalFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of processes cannot be written then, and it is only for people."""

    class Programs:
        pids: ClassVar = {"agent-1": 1}

        def tend(self) -> list[Death]:
            return [Death("agent-1", -9, 1.0, 1)]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.up.up.Supervisor", lambda _: Programs())
    monkeypatch.setattr("workers.up.up.replace_file", full)
    said: list[str] = []
    running = Running("", "lab_secret", False, made)
    run = _Run(running, cast(Any, None), port=0, stop=threading.Event(), complain=said.append)
    run._tend()
    assert said == ["agent-1 ended (exit code -9); started again in 1 s"]


ROOT = Path(__file__).parent.parent.parent


def test_the_digits_that_are_dealt_are_those_of_scikit_learn() -> None:
    images, targets = load_digits()
    theirs = datasets.load_digits()
    assert images.shape == (DIGITS, 8, 8)
    np.testing.assert_array_equal(images, theirs.images)
    np.testing.assert_array_equal(targets, theirs.target)


@pytest.mark.process
def test_making_a_federation_of_digits_loads_no_learning_library(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from workers.up.home import make_federation\n"
        "from workers.up import FederationPlan\n"
        "make_federation(Path(sys.argv[1]), FederationPlan(agents=2))\n"
        "print(*sorted({'sklearn', 'torch', 'faiss', 'timm', 'matplotlib', 'scipy.optimize'} & set(sys.modules)))\n"
    )
    tmp_path.chmod(0o700)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    assert ended.stdout.split() == []
