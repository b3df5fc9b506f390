"""Commands that make homes, care for keys, tokens and journals, and show a site its agent, all without a service."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from api.coordinator.config import read_config
from labeler.errors import BadData, InvalidSetting, PolicyRefusal
from labeler.ledger.agent_memory import AgentMemory
from labeler.ledger.chain import Anchor, Head
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tokens import TokenStore
from labeler.system.erasable import KeyFolder
from labeler.system.keys import PartyKeys
from tests.command_line import Labeler
from tests.labeler.tasks import make_task
from workers.agent.decisions import is_approved
from workers.agent.policy import read_policy
from workers.commands.console import cell, complain, escaped
from workers.homes.journals import trust_restored_journal
from workers.homes.new import read_public
from workers.party.home import read_agent_config, read_tallier_config
from workers.tallier.peers import read_group

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
ACCOUNT = "agent:hospital-a"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def coordinator(tmp_path: Path, labeler: Labeler) -> Path:
    home = tmp_path / "coordinator"
    assert labeler("serve", "--home", home, "--init").code == 0
    return home


@pytest.fixture
def hospital(tmp_path: Path, labeler: Labeler, make_shard: Any) -> Path:
    """An agent's home as `labeler agent init` leaves it."""
    home = tmp_path / "hospital-a"
    shard = make_shard("a.shard").path
    result = labeler(
        "agent", "init", "--home", home, "--id", "hospital-a", "--coordinator", "https://labels.example.org",
        "--shard", shard,
    )  # fmt: skip
    assert result.code == 0, result.err
    return home


def fill_in(policy: Path) -> None:
    """What a person at the site does: remove the # and write numbers and keys."""
    text = re.sub(r"^# (?=[\w-]+ = )", "", policy.read_text(), flags=re.MULTILINE)
    keys = iter(range(10, 99))
    policy.write_text(re.sub("64 hexadecimal digits", lambda _: str(next(keys)) * 32, text))


def open_home(home: Path, *, read_only: bool = False) -> Database:
    return open_database(home / "journal.db", anchor=home / "journal.head", read_only=read_only)


def spend(home: Path, name: str, amount: int, *, agent: int | None = None) -> None:
    """A journal with a charge in it, as the home's process leaves it; earlier ones left out a level without a price."""
    with closing(open_home(home)) as database:
        ledger = Ledger(database, clock=lambda: NOW)
        ledger.open_account(ACCOUNT, "instance", 5_000_000_000)
        ledger.open_account(ACCOUNT, "agent", None)
        whole_site = [] if agent is None else [Charge(ACCOUNT, "agent", agent)]
        ledger.reserve(name, [Charge(ACCOUNT, "instance", amount), *whole_site])
        ledger.post(name)


# Homes


def test_a_new_coordinator_has_keys_and_settings_that_can_be_read(coordinator: Path) -> None:
    config = read_config(coordinator / "coordinator.toml")
    assert config.federation.instance_epsilon == 1.0
    assert PartyKeys.load(coordinator / "keys.json").public
    assert stat.S_IMODE(coordinator.stat().st_mode) == 0o700


def test_a_home_is_made_once(coordinator: Path, hospital: Path, labeler: Labeler) -> None:
    keys = (coordinator / "keys.json").read_bytes()
    again = labeler("serve", "--home", coordinator, "--init")
    assert (again.code, (coordinator / "keys.json").read_bytes()) == (2, keys)
    assert "made once" in again.err
    shard = read_agent_config(hospital).shard
    again = labeler("agent", "init", "--home", hospital, "--id", "x", "--coordinator", "https://x", "--shard", shard)
    assert again.code == 2


@pytest.mark.parametrize("role", ["coordinator", "agent", "tallier"])
def test_a_home_for_which_there_was_no_room_is_made_by_the_same_command(
    tmp_path: Path, coordinator: Path, labeler: Labeler, make_shard: Any, role: str
) -> None:
    keys, write_bytes = coordinator / "keys.public.json", Path.write_bytes
    options = {
        "coordinator": ("serve", "--init"),
        "agent": ("agent", "init", "--id", "h", "--coordinator", "https://x", "--shard", make_shard("a.shard").path),
        "tallier": (
            *("tallier", "init", "--id", "t", "--number", 1, "--coordinator", "https://x"),
            *("--coordinator-keys", keys, "--listen", "127.0.0.1:7701"),
        ),
    }[role]
    for room in range(10):
        home, files = tmp_path / f"{role}-{room}", count()

        def write(path: Path, data: bytes, files: Iterator[int] = files, room: int = room) -> int:
            if next(files) >= room:  # the system's error names no file, as here
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write_bytes(path, data)

        with pytest.MonkeyPatch.context() as full:
            full.setattr(Path, "write_bytes", write)
            first = labeler(*options, "--home", home)
        if first.code == 0:
            break
        assert first.code == 75
        assert f"cannot write {home}/" in first.err
        assert "/." not in first.err, "the file that people know is named"
        assert "No space left on device. Make room, then give the same command again" in first.err
        assert labeler(*options, "--home", home).code == 0
        assert {path.name for path in home.iterdir()} >= {"keys.json", f"{role}.toml"}
    assert room >= 3


def test_a_backup_for_which_there_was_no_room_leaves_nothing(
    tmp_path: Path, coordinator: Path, labeler: Labeler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert labeler("keys", "token", "--home", coordinator, "--name", "data team", "--role", "admin").code == 0

    def full(source: Path, out: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(out))

    monkeypatch.setattr(shutil, "copy2", full)
    out = tmp_path / "backups" / "monday"
    failed = labeler("journal", "backup", "--home", coordinator, "--out", out)
    assert failed.code == 75
    assert f"cannot write {out}/coordinator.toml: No space left on device" in failed.err
    assert not out.parent.exists()


def test_a_new_agent_refuses_everything_until_its_policy_is_filled_in(hospital: Path) -> None:
    assert read_agent_config(hospital).agent_id == "hospital-a"
    with pytest.raises(PolicyRefusal, match="allows nothing as it is"):
        read_policy(hospital / "policy.toml")
    fill_in(hospital / "policy.toml")
    policy = read_policy(hospital / "policy.toml")
    assert policy.allow.backbones == ("backbone",)
    assert policy.allow.approval
    assert len(policy.talliers) == 3


def test_an_agent_cannot_be_made_of_public_images(tmp_path: Path, labeler: Labeler, make_shard: Any) -> None:
    shard = make_shard("public.shard", public=True).path
    result = labeler(
        "agent", "init", "--home", tmp_path / "h", "--id", "h", "--coordinator", "https://x", "--shard", shard
    )
    assert result.code == 2
    assert "public shard" in result.err
    assert not (tmp_path / "h").exists()


def test_a_tallier_is_made_with_the_coordinators_public_keys(
    tmp_path: Path, coordinator: Path, labeler: Labeler
) -> None:
    home = tmp_path / "registry"
    arguments = ("tallier", "init", "--home", home, "--id", "registry", "--number", 1, "--coordinator", "https://x")
    made = labeler(*arguments, "--coordinator-keys", coordinator / "keys.public.json", "--json")
    assert made.code == 0, made.err
    public = PartyKeys.load(coordinator / "keys.json").public
    assert read_tallier_config(home).coordinator_verify_key == public.verify_key
    assert (made.document["party_id"], made.document["role"], made.document["tallier"]) == ("registry", "tallier", 1)
    assert labeler("keys", "show", "--home", home, "--json").document == made.document


# Keys and tokens


def test_public_keys_are_shown_with_the_fingerprint_to_read_out(hospital: Path, labeler: Labeler) -> None:
    public = PartyKeys.load(hospital / "keys.json").public
    shown = labeler("keys", "show", "--home", hospital)
    assert public.fingerprint in shown.out
    assert public.seal_key in shown.out
    sent = json.loads((hospital / "keys.public.json").read_text())
    assert sent["verify_key"] == public.verify_key
    assert "signing_key" not in sent


def test_rotated_keys_are_new_and_the_old_ones_stay_beside_them(hospital: Path, labeler: Labeler) -> None:
    old = (hospital / "keys.json").read_bytes()
    rotated = labeler("keys", "rotate", "--home", hospital, "--json")
    assert rotated.document["verify_key"] == PartyKeys.load(hospital / "keys.json").public.verify_key
    [kept] = hospital.glob("keys.json.*")
    assert kept.read_bytes() == old
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_keys_are_not_rotated_under_a_running_process(hospital: Path, labeler: Labeler) -> None:
    spend(hospital, "r1", 1)
    before = (hospital / "keys.json").read_bytes()
    with closing(open_home(hospital)):
        result = labeler("keys", "rotate", "--home", hospital)
    assert result.code == 75
    assert (hospital / "keys.json").read_bytes() == before


def test_the_first_token_is_made_at_a_stopped_coordinator_and_kept_as_a_hash(
    coordinator: Path, labeler: Labeler
) -> None:
    made = labeler("keys", "token", "--home", coordinator, "--name", "data team", "--role", "admin", "--json")
    secret = made.document["token"]
    assert secret.startswith("lab_")
    with closing(open_home(coordinator)) as database:
        found = TokenStore(database).find(secret)
        busy = labeler("keys", "token", "--home", coordinator, "--name", "x", "--role", "viewer")
    assert found is not None
    assert (found.name, found.role) == ("data team", "admin")
    assert busy.code == 75
    assert "is running" in busy.err
    assert all(secret.encode() not in path.read_bytes() for path in coordinator.rglob("*") if path.is_file())


# Journals


def test_a_journal_is_verified_while_its_owner_runs(hospital: Path, labeler: Labeler) -> None:
    spend(hospital, "r1", 7)
    with closing(open_home(hospital)):
        found = labeler("journal", "verify", "--home", hospital, "--json")
    assert found.code == 0
    assert found.document["entries"] == 4


def test_a_backup_is_a_home_that_opens(tmp_path: Path, hospital: Path, labeler: Labeler) -> None:
    spend(hospital, "r1", 7)
    keys = KeyFolder(hospital / "erasable")
    keys.draw("a" * 64)
    with closing(open_home(hospital)):
        made = labeler("journal", "backup", "--home", hospital, "--out", tmp_path / "backups" / "monday", "--json")
    assert made.code == 0, made.err
    copy = tmp_path / "backups" / "monday"
    assert set(made.document["files"]) == {path.name for path in copy.iterdir()}
    names = {path.name for path in copy.iterdir()}
    assert {"agent.toml", "policy.toml", "keys.json", "journal.db", "journal.head"} <= names
    assert "erasable" not in names
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in copy.iterdir() if "public" not in path.name)
    assert labeler("journal", "verify", "--home", copy, "--json").document["entries"] == 4
    with closing(open_home(copy)) as database:
        assert Ledger(database, clock=lambda: NOW).balance(ACCOUNT, "instance").spent == 7


def test_a_backup_never_replaces_another(tmp_path: Path, hospital: Path, labeler: Labeler) -> None:
    spend(hospital, "r1", 7)
    (tmp_path / "taken").mkdir()
    assert labeler("journal", "backup", "--home", hospital, "--out", tmp_path / "taken").code == 2
    assert list((tmp_path / "taken").iterdir()) == []


def test_a_backup_of_a_damaged_journal_fails_and_leaves_nothing(
    tmp_path: Path, hospital: Path, labeler: Labeler
) -> None:
    spend(hospital, "r1", 7)
    path = hospital / "journal.db"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    result = labeler("journal", "backup", "--home", hospital, "--out", tmp_path / "copy")
    assert result.code in (1, 75)
    assert not (tmp_path / "copy").exists()


def test_a_journal_from_before_its_owners_first_start_gives_no_budget_back(coordinator: Path, labeler: Labeler) -> None:
    assert labeler("keys", "token", "--home", coordinator, "--name", "data team", "--role", "admin").code == 0
    Anchor(coordinator / "journal.head").replace(Head(3, "ab" * 32))
    refused = labeler("journal", "accept-restored", "--home", coordinator, "--reason", "the disk was lost")
    assert refused.code == 1
    assert "has no account, so nothing of what was spent could be counted" in refused.err
    assert Anchor(coordinator / "journal.head").read() == Head(3, "ab" * 32)


def test_what_is_left_of_an_account_can_be_written_off(hospital: Path, labeler: Labeler) -> None:
    spend(hospital, "r1", 7)
    arguments = ("journal", "write-off", "--home", hospital, "--account", ACCOUNT, "--reason", "unknown charges")
    assert labeler(*arguments, "--json").document["written_off_nano"] == 5_000_000_000 - 7
    assert labeler(*arguments, "--json").document["written_off_nano"] == 0
    assert labeler(*arguments, "--level", "agent").code == 2
    assert labeler(*arguments, "--level", "moon").code == 2
    with closing(open_home(hospital)):
        assert labeler(*arguments).code == 75


# A site's own eyes


def test_a_site_sees_what_its_agent_has_spent(hospital: Path, labeler: Labeler) -> None:
    fill_in(hospital / "policy.toml")
    spend(hospital, "r1", 50_000_000)
    with closing(open_home(hospital)):
        found = labeler("agent", "budget", "--home", hospital, "--json").document
        shown = labeler("agent", "budget", "--home", hospital)
    by_level = {one["level"]: one for one in found}
    assert by_level["instance"]["spent_nano"] == 50_000_000
    assert 0.5 < by_level["instance"]["spent_epsilon"] < 1.2
    assert by_level["instance"]["left_nano"] == 5_000_000_000 - 50_000_000
    assert by_level["agent"]["spent_epsilon"] is None
    assert " 1.0% " in shown.out  # the share that is spent
    assert "no bound" in shown.out


@pytest.mark.parametrize("agent_epsilon", ["unlimited", 10.0])
def test_where_charges_may_be_forgotten_only_what_was_written_off_is_known(
    hospital: Path, labeler: Labeler, agent_epsilon: float | str
) -> None:
    fill_in(hospital / "policy.toml")
    spend(hospital, "r1", 7, agent=3)
    if agent_epsilon != "unlimited":
        with closing(open_home(hospital)) as database:
            Ledger(database, clock=lambda: NOW).open_account(ACCOUNT, "agent", 1_000)
    for level in ["instance"] if agent_epsilon == "unlimited" else ["instance", "agent"]:
        arguments = ("journal", "write-off", "--home", hospital, "--account", ACCOUNT, "--level", level)
        assert labeler(*arguments, "--reason", "restored").code == 0
    by_level = {one["level"]: one for one in labeler("agent", "budget", "--home", hospital, "--json").document}
    assert (by_level["agent"]["spent_epsilon"] is None) == (agent_epsilon == "unlimited")
    assert by_level["instance"]["left_nano"] == 0


def test_a_person_sees_what_waits_and_approves_it_by_its_first_digits(hospital: Path, labeler: Labeler) -> None:
    fill_in(hospital / "policy.toml")
    tasks = [make_task(nonce=nonce, sigma_votes=90.0, agents=7, colluding_agents=2) for nonce in ("n", "m")]
    with closing(open_home(hospital)) as database:
        memory = AgentMemory(database, Ledger(database, clock=lambda: NOW))
        for task in tasks:
            memory.request(task, NOW)
        waiting = labeler("agent", "waiting", "--home", hospital, "--json").document
        assert [one["task_id"] for one in waiting] == sorted(task.digest for task in tasks)
        assert waiting[0]["instance_epsilon"] > 0
        for one in waiting:
            assert (one["agents"], one["colluding_agents"], one["noise_contributors"]) == (7, 2, 5)
            assert one["sigma_votes"] == 90.0
        chosen = tasks[0].digest
        assert labeler("agent", "approve", chosen[:10], "--home", hospital).code == 0
        assert is_approved(hospital, chosen)
        assert not is_approved(hospital, tasks[1].digest)
        left = labeler("agent", "waiting", "--home", hospital)
        assert tasks[1].digest in left.out.replace("\n", "").replace(" ", "")
        assert labeler("agent", "approve", "ffff", "--home", hospital).code in (0, 1)
        assert labeler("agent", "approve", chosen, "--home", hospital, "--revoke").code == 0
        assert not is_approved(hospital, chosen)


def test_a_terminal_obeys_no_text_from_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert escaped("x\x1b[2K\r\n\u202e\ud800") == "x\\x1b[2K\\r\\n\\u202e\\ud800"
    assert cell("[bold]x\x07").plain == "[bold]x\\x07"
    complain("the other side says \x1b]0;owned\x07 [/x]")
    assert "says \\x1b]0;owned\\x07 [/x]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes", [{"party_id": "a\x1b[1A\x1b[2Kb"}, {"role": "agent)\x1b[8m"}, {"party_id": 7}, {"role": None}]
)
def test_a_file_of_keys_cannot_write_over_the_fingerprint_it_is_shown_with(
    hospital: Path, changes: dict[str, Any]
) -> None:
    path = hospital / "keys.public.json"
    document = json.loads(path.read_text())
    assert read_public(path) == document
    path.write_text(json.dumps(document | changes))
    with pytest.raises(BadData, match="not a file of public keys"):
        read_public(path)


def test_three_talliers_pin_each_other_from_the_files_their_sites_sent(
    tmp_path: Path, coordinator: Path, labeler: Labeler
) -> None:
    homes = [tmp_path / f"t{number}" for number in range(3)]
    for number, home in enumerate(homes):
        arguments = ("--id", f"site-{number}", "--number", number, "--coordinator", "https://x")
        # The last one is made without, and is given its address later.
        listen = () if number == 2 else ("--listen", f"127.0.0.1:{7700 + number}")
        keys = ("--coordinator-keys", coordinator / "keys.public.json")
        made = labeler("tallier", "init", "--home", home, *arguments, *keys, *listen)
        assert made.code == 0, made.err
    assert "certificate" not in read_public(homes[2] / "keys.public.json")
    refused = labeler("tallier", "peers", "--home", homes[0], *(home / "keys.public.json" for home in homes[1:]))
    assert "its site makes them with labeler tallier listen HOST:PORT --home HOME" in refused.err
    assert labeler("tallier", "listen", "0.0.0.0:7702", "--home", homes[2]).code != 0
    assert labeler("tallier", "listen", "127.0.0.1:7702", "--home", homes[2]).code == 0
    shown = labeler("keys", "show", "--home", homes[2], "--json").document
    assert shown == read_public(homes[2] / "keys.public.json")
    assert shown["listen"] == "127.0.0.1:7702"
    for number, home in enumerate(homes):
        others = [other / "keys.public.json" for other in homes if other != home]
        pinned = labeler("tallier", "peers", "--home", home, *others, "--json")
        assert pinned.code == 0, pinned.err
        assert [peer["party_id"] for peer in pinned.document] == [f"site-{one}" for one in range(3) if one != number]
        assert stat.S_IMODE((home / "winner.pem").stat().st_mode) == 0o600
    groups = [read_group(home, own_verify_key=PartyKeys.load(home / "keys.json").public.verify_key) for home in homes]
    assert len({(group.digest, group.addresses, group.verify_keys) for group in groups if group is not None}) == 1
    again = labeler("tallier", "peers", "--home", homes[0], homes[1] / "keys.public.json")
    assert "this is tallier 0: name the files of talliers 1 and 2, each once; found 1" in again.err


# A site's consent to a coordinator's restored journal: to one head, kept beside what was seen before


SEEN, ACCEPTED = Head(40, "a" * 64), Head(12, "b" * 64)
TEXT = f"12:{ACCEPTED.hash}"


@pytest.fixture
def consenting(tmp_path: Path) -> Path:
    """As much of an agent's home as consent needs."""
    (tmp_path / "agent.toml").write_text("")
    Anchor(tmp_path / "coordinator.head").remember(SEEN)
    return tmp_path


def test_what_was_seen_is_kept_beside_what_is_accepted(consenting: Path) -> None:
    told = trust_restored_journal(consenting, TEXT)
    assert told["seen"] == {"entries": 40, "hash": SEEN.hash}
    assert Anchor(consenting / "coordinator.head").read() == ACCEPTED
    assert Anchor(Path(told["kept"])).read() == SEEN
    with pytest.raises(InvalidSetting, match="nothing to consent to"):
        trust_restored_journal(consenting, TEXT)


def test_what_was_seen_may_be_damaged(consenting: Path) -> None:
    (consenting / "coordinator.head").write_bytes(b"half a rec")
    assert trust_restored_journal(consenting, TEXT)["seen"] is None
    assert Anchor(consenting / "coordinator.head").read() == ACCEPTED


@pytest.mark.parametrize(
    "head", ["", "12", "12:abc", f"0:{'b' * 64}", f"-1:{'b' * 64}", f"12:{'B' * 64}", f"1e3:{'b' * 64}"]
)
def test_a_head_that_is_none_is_refused_and_changes_nothing(consenting: Path, head: str) -> None:
    with pytest.raises(InvalidSetting, match="ENTRY:HASH"):
        trust_restored_journal(consenting, head)
    assert Anchor(consenting / "coordinator.head").read() == SEEN


def test_only_a_party_that_has_seen_something_consents(consenting: Path, tmp_path: Path) -> None:
    (consenting / "coordinator.head").unlink()
    with pytest.raises(InvalidSetting, match="seen nothing"):
        trust_restored_journal(consenting, TEXT)
    (consenting / "agent.toml").unlink()
    with pytest.raises(InvalidSetting, match="not the home of an agent or a tallier"):
        trust_restored_journal(consenting, TEXT)


def test_a_new_operator_learns_of_the_first_token_and_of_the_example_address(tmp_path: Path, labeler: Labeler) -> None:
    from datetime import UTC, datetime

    from labeler.ledger.tokens import TokenRecord
    from workers.serve import Edge, missing_steps, read_settings

    home = tmp_path / "coordinator"
    made = labeler("serve", "--home", home, "--init")
    assert all(f"--role {role}" in made.out for role in ("admin", "requester"))
    settings = read_settings(home)
    address, token = missing_steps(settings, [], edge=None)
    assert "public_url" in address
    assert f"labeler keys token --home {home} --name NAME --role admin" in token
    active = TokenRecord("t", "first", "admin", datetime.now(UTC))
    revoked = TokenRecord("t", "first", "admin", datetime.now(UTC), datetime.now(UTC))
    assert missing_steps(settings, [active, revoked], edge=None) == [address]
    assert missing_steps(settings, [revoked], edge=None) == [address, token]
    own = settings.model_copy(update={"public_url": "https://labels.hospital.example"})
    assert missing_steps(own, [active], edge=None) == []
    assert missing_steps(settings, [active], edge=Edge("labels.example.org", 443, "acme", None)) == []
