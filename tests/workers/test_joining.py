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
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import CapsTable, CoordinatorConfig
from labeler import invitation
from labeler.system.keys import PartyKeys
from tests.api.routes.conftest import Service, running
from tests.command_line import Labeler
from workers.agent.policy import read_policy
from workers.agent.service import run_agent
from workers.party.home import read_agent_config, read_tallier_config
from workers.up.redis_server import RedisServer

ROOT = Path(__file__).parents[2]


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("authority") / "tls"
    command = [ROOT / "deploy" / "make-certificate.sh", made, "localhost", "127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return made


@contextmanager
def speaking_tls(tls: tuple[Path, Path], port: int, upstream: int) -> Iterator[None]:
    """An edge of a few lines: it ends TLS at `port` and hands every byte on to `upstream`."""
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
        async with await asyncio.start_server(connected, "127.0.0.1", port, ssl=context):
            is_open.set()
            await ended.wait()

    with asyncio.Runner() as runner:
        is_open, ended = threading.Event(), asyncio.Event()
        loop = runner.get_loop()
        thread = threading.Thread(target=runner.run, args=(edge(),))
        thread.start()
        try:
            assert is_open.wait(60), "the edge did not start"
            yield
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def service(redis_url: str, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A coordinator behind an edge with a private authority, without any enrolled party."""
    shutil.copytree(authority, tmp_path / "tls")
    upstream, port = free_port(), free_port()
    home = tmp_path / "coordinator"
    home.mkdir(mode=0o700)
    caps = CapsTable(instance_epsilon=5.0, agent_epsilon="unlimited")
    config = CoordinatorConfig(
        home=home,
        redis_url=redis_url,
        public_url=f"https://127.0.0.1:{port}",
        federation=caps,
        agents=caps,
        backbones={"backbone": "pixels"},
    )
    tls = (tmp_path / "tls" / "coordinator.pem", tmp_path / "tls" / "coordinator.key")
    with running(config, is_filled=False, port=upstream) as started, speaking_tls(tls, port, upstream):
        monkeypatch.setenv("LABELER_URL", config.public_url)
        monkeypatch.setenv("LABELER_TOKEN", started.tokens["admin"])
        monkeypatch.setenv("LABELER_CA_FILE", str(tmp_path / "tls" / "ca.pem"))
        yield started


def join_talliers(labeler: Labeler) -> None:
    for number in range(3):
        made = labeler("invite", f"t{number}", "--role", "tallier", "--json")
        assert made.code == 0, made.err
        phrase = ("--phrase", made.document["phrase"])
        joined = labeler("tallier", "join", f"t{number}.invitation.json", "--home", f"t{number}", *phrase)
        assert joined.code == 0, joined.err


def test_a_hospital_joins_with_two_commands_and_its_home_is_whole(
    service: Service, labeler: Labeler, make_shard: Any, tmp_path: Path
) -> None:
    join_talliers(labeler)
    make_shard("a.shard")
    invited = labeler("invite", "hospital-a")
    assert invited.code == 0, invited.err
    phrase = re.search(r"[0-9A-Z]{4}-[0-9A-Z]{4}-[0-9A-Z]{4}", invited.out)
    assert phrase is not None
    assert stat.S_IMODE((tmp_path / "hospital-a.invitation.json").stat().st_mode) == 0o600
    joined = labeler(
        "agent",
        "join",
        "hospital-a.invitation.json",
        "--shard",
        "a.shard",
        "--home",
        "a",
        "--phrase",
        phrase[0].lower(),
    )
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


def run_once(home: Path, service: Service, party_id: str) -> None:
    """The process of a home serves until it was heard of again."""
    parties = service.coordinator.stores.parties
    stop = threading.Event()
    before = parties.get(party_id).last_contact
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            run_agent(home, stop=stop, wait_s=0.2)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    pause = threading.Event()
    while parties.get(party_id).last_contact == before and thread.is_alive():
        pause.wait(0.02)
    stop.set()
    thread.join(30)
    assert not failures


def test_another_phrase_does_nothing(service: Service, labeler: Labeler, tmp_path: Path) -> None:
    assert labeler("invite", "t0", "--role", "tallier").code == 0
    refused = labeler("tallier", "join", "t0.invitation.json", "--home", "t0", "--phrase", "AAAA-BBBB-CCCC")
    assert refused.code == 2
    assert "exchanged on its way" in refused.err
    assert not (tmp_path / "t0").exists()
    # Nobody at the keyboard: nothing is agreed to.
    assert labeler("tallier", "join", "t0.invitation.json", "--home", "t0").code == 1
    assert not (tmp_path / "t0").exists()


def test_whoever_joins_types_the_phrase_they_hear_and_is_shown_none(
    service: Service, labeler: Labeler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json.loads(labeler("invite", "t0", "--role", "tallier", "--json").out)
    join = ("tallier", "join", made["file"], "--home", "t0")
    for typed, code in (("y", 2), ("AAAA-BBBB-CCCC", 2), (made["phrase"].lower().replace("-", " "), 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}\n"))
        said = labeler(*join)
        assert said.code == code, said
        assert made["phrase"] not in said.out + said.err
        assert (tmp_path / "t0").exists() == (code == 0)


@pytest.mark.parametrize("field", ["url", "seal_key", "party_id", "token", "expires_at"])
def test_a_file_that_was_changed_on_its_way_is_refused(
    service: Service, labeler: Labeler, tmp_path: Path, field: str
) -> None:
    assert labeler("invite", "t0", "--role", "tallier").code == 0
    path = tmp_path / "t0.invitation.json"
    document = json.loads(path.read_text())
    changed = {"url": "https://elsewhere.example", "seal_key": "ab" * 32, "party_id": "t9", "expires_at": 2**39}
    document[field] = changed.get(field, "inv_" + "x" * 43)
    if field == "seal_key":
        document["roster_digest"] = _digest(document)
    path.write_text(json.dumps(document))
    refused = labeler("tallier", "join", path, "--home", "t0", "--phrase", "AAAA-BBBB-CCCC")
    assert refused.code == 1
    assert "changed after the coordinator signed it" in refused.err
    assert not (tmp_path / "t0").exists()


def _digest(document: dict[str, Any]) -> str:
    from labeler.invitation import roster_digest

    return roster_digest(document["verify_key"], document["seal_key"], ())


def test_a_hospital_is_told_to_wait_for_the_talliers(service: Service, labeler: Labeler) -> None:
    refused = labeler("invite", "hospital-a")
    assert refused.code == 1
    assert "talliers are enrolled; enrolled:" in refused.err
    assert "labeler invite NAME --role tallier --number 0" in refused.err


def test_the_same_command_goes_on_after_an_answer_that_was_lost(
    service: Service, labeler: Labeler, make_shard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_talliers(labeler)
    make_shard("a.shard")
    phrase = labeler("invite", "hospital-a", "--json").document["phrase"]
    command = ("agent", "join", "hospital-a.invitation.json", "--shard", "a.shard", "--home", "a", "--phrase", phrase)
    from workers.party.coordinator import CoordinatorHttp, Unreachable

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
    (tmp_path / "a" / "policy.toml").write_text(
        (tmp_path / "a" / "policy.toml").read_text().replace("instance_epsilon = 1.0", "instance_epsilon = 0.25")
    )
    again = labeler(*command)
    assert again.code == 0, again.err
    assert (tmp_path / "a" / "keys.json").read_bytes() == keys
    assert read_policy(tmp_path / "a" / "policy.toml").budget.instance_epsilon == 0.25, "what a person wrote stays"
    # Somebody who has the file, too, comes too late and hears what to do.
    other = labeler(*command[:6], "b", "--phrase", phrase)
    assert other.code == 1
    assert "used before, with other keys" in other.err


def test_new_keys_come_by_invitation_and_bring_the_talliers_as_they_are_now(
    service: Service, labeler: Labeler, make_shard: Any, tmp_path: Path
) -> None:
    join_talliers(labeler)
    make_shard("a.shard")
    phrase = labeler("invite", "hospital-a", "--json").document["phrase"]
    command = ("agent", "join", "hospital-a.invitation.json", "--home", "a")
    assert labeler(*command, "--shard", "a.shard", "--phrase", phrase).code == 0
    policy_file = tmp_path / "a" / "policy.toml"
    policy_file.write_text("# our own words\n" + policy_file.read_text().replace("day = 1000", "day = 77"))
    before = PartyKeys.load(tmp_path / "a" / "keys.json").public

    # A tallier is replaced by another one.
    assert labeler("keys", "revoke", "t1").code == 0
    made = labeler("invite", "t9", "--role", "tallier", "--json").document
    assert labeler("tallier", "join", "t9.invitation.json", "--home", "t9", "--phrase", made["phrase"]).code == 0
    phrase = labeler("invite", "hospital-a", "--rotate", "--json").document["phrase"]
    renewed = labeler(*command, "--phrase", phrase)
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
    assert labeler(*command, "--phrase", phrase).code == 0
    assert PartyKeys.load(tmp_path / "a" / "keys.json").public == after
    run_once(tmp_path / "a", service, "hospital-a")


def test_keys_are_not_renewed_under_a_process_that_runs(
    service: Service, labeler: Labeler, make_shard: Any, tmp_path: Path
) -> None:
    join_talliers(labeler)
    made = labeler("invite", "t0", "--role", "tallier", "--rotate", "--json")
    assert made.code == 0, made.err
    keys = (tmp_path / "t0" / "keys.json").read_bytes()
    from labeler.ledger.database import open_database

    with open_database(tmp_path / "t0" / "journal.db", anchor=tmp_path / "t0" / "journal.head"):
        refused = labeler("tallier", "join", "t0.invitation.json", "--home", "t0", "--phrase", made.document["phrase"])
    assert refused.code == 75
    assert "stop it first" in refused.err
    assert (tmp_path / "t0" / "keys.json").read_bytes() == keys
    assert not (tmp_path / "t0" / "keys.next.json").exists()


def test_a_tallier_names_the_hospitals_it_sums_from_their_files(
    service: Service, labeler: Labeler, make_shard: Any, tmp_path: Path
) -> None:
    join_talliers(labeler)
    make_shard("a.shard")
    phrase = labeler("invite", "hospital-a", "--json").document["phrase"]
    joined = labeler(
        "agent", "join", "hospital-a.invitation.json", "--shard", "a.shard", "--home", "a", "--phrase", phrase, "--json"
    )
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
