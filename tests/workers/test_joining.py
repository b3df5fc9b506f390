"""Joining by an invitation, from the shell: what a site sees, what its home holds, what is done again after trouble."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import CoordinatorConfig
from feature_store.shard import Shard
from labeler import invitation
from labeler.caps import CapsTable
from labeler.ledger.database import open_database
from labeler.system.keys import PartyKeys
from tests.api.routes.conftest import Service, running_at_a_socket
from tests.command_line import Labeler
from tests.feature_store.conftest import write_pictures
from tests.processes import wait_until
from tests.workers.conftest import Running
from workers.agent import images
from workers.agent.policy import read_policy
from workers.agent.service import run_agent
from workers.party.coordinator import CoordinatorHttp, Unreachable
from workers.party.home import EmbedSettings, read_agent_config, read_tallier_config
from workers.up.redis_server import RedisServer

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _phrases_are_stretched_once() -> Iterator[None]:
    """One process invites and joins here, and each phrase is 16 MiB of scrypt."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(invitation, "phrase_of", cache(invitation.phrase_of))
        yield


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@contextmanager
def speaking_tls(tls: tuple[Path, Path], listening: socket.socket, upstream: int) -> Iterator[None]:
    """An edge of a few lines: it ends TLS where it listens, and hands every byte on to the port `upstream`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while some := await reader.read(65_536):
                writer.write(some)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, back = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(pump(reader, back), pump(to, writer))

    async def edge() -> None:
        async with await asyncio.start_server(connected, sock=listening, ssl=context):
            is_open.set()
            await ended.wait()

    with asyncio.Runner() as runner:
        is_open, ended = threading.Event(), asyncio.Event()
        loop = runner.get_loop()
        thread = threading.Thread(target=runner.run, args=(edge(),))
        thread.start()
        try:
            assert is_open.wait(90), "the edge did not start"
            yield
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join(90)
            assert not thread.is_alive()


@pytest.fixture
def service(redis_url: str, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A coordinator behind an edge with a private authority, without any enrolled party."""
    shutil.copytree(authority, tmp_path / "tls")
    listening = socket.create_server(("127.0.0.1", 0))
    home = tmp_path / "coordinator"
    home.mkdir(mode=0o700)
    caps = CapsTable(instance_epsilon=5.0, agent_epsilon="unlimited")
    config = CoordinatorConfig(
        home=home,
        redis_url=redis_url,
        public_url=f"https://127.0.0.1:{listening.getsockname()[1]}",
        federation=caps,
        agents=caps,
        backbones={"backbone": "pixels"},
    )
    tls = (tmp_path / "tls" / "coordinator.pem", tmp_path / "tls" / "coordinator.key")
    with (
        listening,
        running_at_a_socket(config, is_filled=False) as started,
        speaking_tls(tls, listening, int(started.url.rpartition(":")[2])),
    ):
        monkeypatch.setenv("LABELER_URL", config.public_url)
        monkeypatch.setenv("LABELER_TOKEN", started.tokens["admin"])
        monkeypatch.setenv("LABELER_CA_FILE", str(tmp_path / "tls" / "ca.pem"))
        yield started


def phrase_for(labeler: Labeler, *invited: str) -> str:
    made = labeler("invite", *invited, "--json")
    assert made.code == 0, made.err
    return str(made.document["phrase"])


@pytest.fixture
def talliers(service: Service, labeler: Labeler, make_shard: Any) -> None:
    """Three that have joined, and a hospital's shard."""
    make_shard("a.shard")
    for name in ("t0", "t1", "t2"):
        phrase = phrase_for(labeler, name, "--role", "tallier")
        joined = labeler("tallier", "join", f"{name}.invitation.json", "--home", name, "--phrase", phrase)
        assert joined.code == 0, joined.err


JOIN = ("agent", "join", "hospital-a.invitation.json", "--home", "a")


def test_a_hospital_joins_with_two_commands_and_its_home_is_whole(
    talliers: None, service: Service, labeler: Labeler, tmp_path: Path
) -> None:
    invited = labeler("invite", "hospital-a")
    assert invited.code == 0, invited.err
    phrase = re.search(r"[0-9A-Z]{4}-[0-9A-Z]{4}-[0-9A-Z]{4}", invited.out)
    assert phrase is not None
    assert stat.S_IMODE((tmp_path / "hospital-a.invitation.json").stat().st_mode) == 0o600
    joined = labeler(*JOIN, "--shard", "a.shard", "--phrase", phrase[0].lower())
    assert joined.code == 0, joined.err
    for screen in (invited.out, joined.out):
        assert max(map(len, screen.splitlines())) <= 80, screen
    for word in (service.coordinator.config.public_url, "t0", "t1", "t2", "approval of a person"):
        assert word in joined.out
    assert "labeler agent desk --home a" in joined.out
    # Everything is pinned, without a key copied by hand.
    policy = read_policy(tmp_path / "a" / "policy.toml")
    keys = {number: PartyKeys.load(tmp_path / f"t{number}" / "keys.json").public for number in range(3)}
    assert policy.talliers == {f"t{number}": keys[number].seal_key for number in range(3)}
    parties = service.coordinator.roster.party_list()
    assert policy.coordinator.verify_key == parties.coordinator_verify_key
    assert policy.allow.approval
    assert policy.allow.max_noise_contributors == 1
    assert policy.allow.releases == ("histogram",)
    assert read_tallier_config(tmp_path / "t0").coordinator_seal_key == parties.coordinator_seal_key
    assert read_tallier_config(tmp_path / "t0").agents is None, "no invitation names whom a tallier sums"
    enrolled = {one.party_id: one for one in parties.parties}
    own = PartyKeys.load(tmp_path / "a" / "keys.json").public
    assert enrolled["hospital-a"].verify_key == own.verify_key
    assert enrolled["hospital-a"].last_contact is not None, "the connection was tried, signed and sealed both ways"
    assert enrolled["hospital-a"].classes == ("cat", "dog", "eel")
    # The home works, also where it is moved, and a backup of it has what the link needs.
    moved = (tmp_path / "a").rename(tmp_path / "moved")
    assert read_agent_config(moved).ca_file == "coordinator-ca.pem"
    run_once(moved, service, "hospital-a")
    assert labeler("journal", "backup", "--home", "moved", "--out", "copy").code == 0
    assert (tmp_path / "copy" / "coordinator-ca.pem").exists()


def test_a_hospital_joins_with_a_folder_of_images_which_its_agent_embeds(
    talliers: None, service: Service, labeler: Labeler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path / "scans", [f"{label}/{number}.png" for label in ("ill", "well") for number in range(9)])
    phrase = phrase_for(labeler, "hospital-a")
    join = (*JOIN, "--images", "scans", "--backbone", "pixels:4", "--phrase", phrase)
    for missing, sentence in (
        ((*JOIN, "--phrase", phrase), "--images FOLDER"),
        ((*JOIN, "--classes", "ill,well", "--shard", "a.shard", "--phrase", phrase), "name it with --images"),
        (join, "--max-records"),
        ((*join, "--max-records", 50, "--shard", "a.shard"), "--images FOLDER"),
        ((*join, "--max-records", 50, "--classes", "sick,well"), "no label in the class list"),
        ((*join, "--max-records", 50, "--home", "scans/ill/a"), "would lie in the folder of images"),
    ):
        refused = labeler(*missing)
        assert refused.code in (1, 2)
        assert sentence in refused.err
        assert not (tmp_path / "a").exists(), "nothing was begun"
    joined = labeler(*join, "--max-records", 50)
    assert joined.code == 0, joined.err
    assert "embeds the images, then answers" in joined.out
    assert max(map(len, joined.out.splitlines())) <= 80
    config = read_agent_config(tmp_path / "a")
    assert config.embedding == EmbedSettings(max_records=50, backbone="pixels:4", classes=("ill", "well")), (
        "the class list that is enrolled follows no folder that comes later"
    )
    assert (config.images, config.shard) == (str(tmp_path / "scans"), "records.shard")
    parties = {one.party_id: one for one in service.coordinator.roster.party_list().parties}
    assert parties["hospital-a"].classes == ("ill", "well"), "known before anything is embedded"
    (backbone,) = read_policy(tmp_path / "a" / "policy.toml").allow.backbones
    monkeypatch.setattr(images, "FIRST_POLL_S", 0.01)
    run_once(tmp_path / "a", service, "hospital-a")
    shard = Shard.open(tmp_path / "a" / "records.shard")
    assert (len(shard), shard.max_records, shard.fingerprint) == (18, 50, backbone)


def run_once(home: Path, service: Service, party_id: str) -> None:
    """The process of a home serves until it was heard of again."""
    parties = service.coordinator.stores.parties
    before = parties.get(party_id).last_contact
    with Running(lambda stop: run_agent(home, stop=stop, wait_s=0.2)) as agent:
        wait_until(lambda: parties.get(party_id).last_contact != before or agent.error)


def test_whoever_joins_types_the_phrase_they_hear_and_is_shown_none(
    service: Service, labeler: Labeler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json.loads(labeler("invite", "t0", "--role", "tallier", "--json").out)
    join = ("tallier", "join", made["file"], "--home", "t0")
    assert labeler(*join).code == 1, "nobody is at the keyboard, so nothing is agreed to"
    assert "exchanged on its way" in labeler(*join, "--phrase", "AAAA-BBBB-CCCC").err
    for typed, code in (("y", 2), ("AAAA-BBBB-CCCC", 2), (made["phrase"].lower().replace("-", " "), 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}\n"))
        said = labeler(*join)
        assert said.code == code, said
        assert made["phrase"] not in said.out + said.err
        assert (tmp_path / "t0").exists() == (code == 0)


@pytest.mark.parametrize("changed", [{"url": "https://elsewhere.example"}, {"token": "inv_" + "x" * 43}])
def test_a_file_that_was_changed_on_its_way_is_refused(
    service: Service, labeler: Labeler, tmp_path: Path, changed: dict[str, str]
) -> None:
    assert labeler("invite", "t0", "--role", "tallier").code == 0
    path = tmp_path / "t0.invitation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    refused = labeler("tallier", "join", path, "--home", "t0", "--phrase", "AAAA-BBBB-CCCC")
    assert refused.code == 1
    assert "changed after the coordinator signed it" in refused.err
    assert not (tmp_path / "t0").exists()


def test_the_same_command_goes_on_after_an_answer_that_was_lost(
    talliers: None, labeler: Labeler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrase = phrase_for(labeler, "hospital-a")
    command = (*JOIN, "--shard", "a.shard", "--phrase", phrase)
    posted = CoordinatorHttp.post

    def lost(self: CoordinatorHttp, path: str, data: bytes, **more: Any) -> bytes:
        posted(self, path, data, **more)
        raise Unreachable("the answer was lost")

    with monkeypatch.context() as trouble:
        trouble.setattr(CoordinatorHttp, "post", lost)
        first = labeler(*command)
    assert first.code == 75
    assert "Run the same command again to go on" in first.err
    keys = (tmp_path / "a" / "keys.json").read_bytes()
    policy = tmp_path / "a" / "policy.toml"
    policy.write_text(policy.read_text().replace("instance_epsilon = 1.0", "instance_epsilon = 0.25"))
    again = labeler(*command)
    assert again.code == 0, again.err
    assert (tmp_path / "a" / "keys.json").read_bytes() == keys
    assert read_policy(policy).budget.instance_epsilon == 0.25, "what a person wrote stays"
    # Somebody who has the file, too, comes too late and hears what to do.
    other = labeler(*JOIN[:-1], "b", "--shard", "a.shard", "--phrase", phrase)
    assert other.code == 1
    assert "used before, with other keys" in other.err


def test_new_keys_come_by_invitation_and_bring_the_talliers_as_they_are_now(
    talliers: None, service: Service, labeler: Labeler, tmp_path: Path
) -> None:
    phrase = phrase_for(labeler, "hospital-a")
    assert labeler(*JOIN, "--shard", "a.shard", "--phrase", phrase).code == 0
    policy_file = tmp_path / "a" / "policy.toml"
    policy_file.write_text("# our own words\n" + policy_file.read_text().replace("day = 1000", "day = 77"))
    before = PartyKeys.load(tmp_path / "a" / "keys.json").public

    # A tallier is replaced by another one.
    assert labeler("keys", "revoke", "t1").code == 0
    heard = phrase_for(labeler, "t9", "--role", "tallier")
    assert labeler("tallier", "join", "t9.invitation.json", "--home", "t9", "--phrase", heard).code == 0
    phrase = phrase_for(labeler, "hospital-a", "--rotate")
    renewed = labeler(*JOIN, "--phrase", phrase)
    assert renewed.code == 0, renewed.err
    assert "t1 is no longer trusted with a share" in renewed.out
    assert "t9 is trusted with a share from now on" in renewed.out

    after = PartyKeys.load(tmp_path / "a" / "keys.json").public
    assert after.verify_key != before.verify_key
    assert service.coordinator.stores.parties.get("hospital-a").verify_key == after.verify_key
    policy = read_policy(policy_file)
    assert set(policy.talliers) == {"t0", "t9", "t2"}
    assert policy.allow.max_queries_per_day == 77
    assert policy_file.read_text().startswith("# our own words")
    assert len(list((tmp_path / "a").glob("keys.json.*"))) == 1
    # Again, as after a crash: the same keys, no others.
    assert labeler(*JOIN, "--phrase", phrase).code == 0
    assert PartyKeys.load(tmp_path / "a" / "keys.json").public == after
    run_once(tmp_path / "a", service, "hospital-a")


def test_keys_are_not_renewed_under_a_process_that_runs(talliers: None, labeler: Labeler, tmp_path: Path) -> None:
    phrase = phrase_for(labeler, "t0", "--role", "tallier", "--rotate")
    keys = (tmp_path / "t0" / "keys.json").read_bytes()
    with open_database(tmp_path / "t0" / "journal.db", anchor=tmp_path / "t0" / "journal.head"):
        refused = labeler("tallier", "join", "t0.invitation.json", "--home", "t0", "--phrase", phrase)
    assert refused.code == 75
    assert "stop it first" in refused.err
    assert (tmp_path / "t0" / "keys.json").read_bytes() == keys
    assert not (tmp_path / "t0" / "keys.next.json").exists()


def test_a_tallier_names_the_hospitals_it_sums_from_their_files(
    talliers: None, labeler: Labeler, tmp_path: Path
) -> None:
    joined = labeler(*JOIN, "--shard", "a.shard", "--phrase", phrase_for(labeler, "hospital-a"), "--json")
    named = labeler("tallier", "agents", "a/keys.public.json", "--home", "t0")
    assert named.code == 0, named.err
    assert joined.document["fingerprint"] in named.out
    config = read_tallier_config(tmp_path / "t0")
    assert config.agents == {"hospital-a": joined.document["verify_key"]}
    assert config.ca_file == "coordinator-ca.pem"
    refused = labeler("tallier", "agents", "t1/keys.public.json", "--home", "t0")
    assert refused.code == 2
    assert "not an agent's" in refused.err


def test_the_authority_goes_along_and_its_key_does_not(service: Service, labeler: Labeler, tmp_path: Path) -> None:
    assert labeler("invite", "t0", "--role", "tallier").code == 0
    document = json.loads((tmp_path / "t0.invitation.json").read_text())
    own = (tmp_path / "tls" / "ca.pem").read_text()
    assert ssl.PEM_cert_to_DER_cert(document["ca_certificates"]) == ssl.PEM_cert_to_DER_cert(own)
    assert "PRIVATE" not in json.dumps(document)
    both = tmp_path / "both.pem"
    both.write_text(own + (tmp_path / "tls" / "ca.key").read_text())
    refused = labeler("invite", "t1", "--role", "tallier", "--ca-file", both)
    assert refused.code != 0
    assert "private key" in refused.err
