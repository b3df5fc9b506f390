"""Homes of agents and talliers: one folder each, readable by its owner only, with everything a party must keep.

    agent HOME      agent.toml    its name, the coordinator's address, and the shard it answers from.
                    records.shard what the agent embeds itself, from a folder of images (workers.agent.images).
                    images.npy    that folder as it was embedded; site.key keys its digests and those of the shard.
                    policy.toml   what the site allows (workers.agent.policy).
                    approved/     what its people decided (workers.agent.decisions).
                    shared-models/ public models that its site personalizes (workers.agent.personal).
                    .predict-*/   features of images while they get labels there; one that was killed leaves them.
    tallier HOME    tallier.toml  its name, the coordinator's address, and the coordinator's keys.
                    winner.pem    its own certificate, and peers.toml the two other talliers (workers.tallier.peers).
    both            keys.json          its own keys.
                    coordinator-ca.pem what the coordinator's certificate is checked against (workers.homes.joining).
                    journal.db         what it has charged, answered or summed; journal.head goes with it.
                    coordinator.head   the newest state of the coordinator's journal it has seen.
                    coordinator.proof  the coordinator's own signed word for it.
                    erasable/          a key for each open round (labeler.system.erasable); never in a backup.

Back up a home with `labeler journal backup`. It leaves out erasable/ and what can be made or downloaded again. An
erased key must not lie in a backup; its absence also reveals a home that was restored.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar, overload

from pydantic import Field, model_validator

from feature_store.backbones.spec import DEFAULT_BACKBONE
from labeler.errors import InvalidSetting, UnsafeStorage
from labeler.settings import SettingsText
from labeler.system.files import read_named, replace_file
from labeler.system.keys import PartyKeys, PublicKeys
from labeler.untrusted import check_party_id
from workers.agent.policy import HexKey, PartyId, Policy, Settings, policy_toml, toml_text

AGENT_FILE = "agent.toml"
TALLIER_FILE = "tallier.toml"
EXAMPLE_URL: Final = "https://labels.example.org"
"""Stands in new settings for the address that only the operator knows."""

COORDINATOR_FILE = "coordinator.toml"
POLICY_FILE = "policy.toml"
RECORDS_FOLDER = "records.shard"
SHARED_FOLDER = "shared-models"
PREDICTING = ".predict-"
KEYS_FILE = "keys.json"
JOURNAL_FILE = "journal.db"
ANCHOR_FILE = "journal.head"
CA_FILE = "coordinator-ca.pem"
SEEN_FILE = "coordinator.head"
PROOF_FILE = "coordinator.proof"

_MAX_SETTINGS_BYTES = 64 * 1024


class EmbedSettings(Settings):
    """`[embedding]` of `agent.toml`: options of `labeler embed` for the folder of images.

    Paths are relative to the home, or absolute.

    Attributes:
        max_records: the public bound on records (docs/public-clock.md).
        backbone, architecture, device, threads, duplicates, split: see `labeler embed`.
        classes: the public class list; the names of the class folders where absent.
        person_level, persons: whose images are whose: the depth of a folder, or a CSV file.
        attributes: a table of several labels per image.
    """

    max_records: Annotated[int, Field(ge=1)]
    backbone: str = DEFAULT_BACKBONE
    architecture: str | None = None
    classes: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    person_level: int | None = None
    persons: str | None = None
    duplicates: Literal["refuse", "keep-first", "keep-all"] | None = None
    attributes: str | None = None
    split: str | None = None
    device: str = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None


class AgentConfig(Settings):
    """`agent.toml`.

    Attributes:
        agent_id: the name it is enrolled under.
        coordinator_url: https://..., or http:// on loopback.
        shard: its private shard; a path relative to the home, or absolute. With `images`, where the agent makes it.
        images: a folder of private images that the agent embeds (workers.agent.images); None where the shard was
            embedded elsewhere.
        embedding: how; given with `images`.
        engine: which exact index engine searches (see feature_store.index.build_index).
        memory_limit_bytes: search in blocks that need at most this much memory besides the shard.
        ca_file: certificates to check the coordinator's against, a path in the home or elsewhere; the system's where
            absent.
        witness_file: an absolute path outside the home, on another disk or machine, for a second copy of the journal's
            furthest state. With it, an agent refuses at its start a home that was restored completely, with its
            erasable keys, even if the coordinator misbehaves. Without it only the coordinator detects that.
        tick_s: T of the site's public clock, in seconds (workers.agent.public_clock); its default where absent. Never
            choose it by observed delays.
        pad: of earlier versions, whose agents padded their work; read, never written, and true does nothing.
    """

    agent_id: PartyId
    coordinator_url: str
    shard: str
    engine: str = "auto"
    memory_limit_bytes: Annotated[int, Field(ge=1)] | None = None
    ca_file: str | None = None
    witness_file: str | None = None
    tick_s: Annotated[float, Field(ge=0.01, le=60.0)] | None = None
    pad: Annotated[bool, Field(exclude=True)] = False
    images: str | None = None
    embedding: EmbedSettings | None = None

    @model_validator(mode="after")
    def _check_images(self) -> AgentConfig:
        if (self.images is None) != (self.embedding is None):
            raise ValueError("a folder of images and a table [embedding] go together")
        return self


class TallierConfig(Settings):
    """`tallier.toml`.

    Attributes:
        tallier_id: the name it is enrolled under.
        coordinator_url: https://..., or http:// on loopback.
        coordinator_verify_key: checks the coordinator's signatures; 64 hexadecimal digits.
        coordinator_seal_key: sums are sealed to it; 64 hexadecimal digits.
        ca_file: certificates to check the coordinator's against, a path in the home or elsewhere; the system's where
            absent.
        agents: `[agents]`, whose ballots are added up: agent id -> its public signing key, 64 hexadecimal digits. Where
            absent, the coordinator says who takes part, and could name fake agents that add no noise.
    """

    tallier_id: PartyId
    coordinator_url: str
    coordinator_verify_key: HexKey
    coordinator_seal_key: HexKey
    ca_file: str | None = None
    agents: dict[PartyId, HexKey] | None = None


C = TypeVar("C", bound=Settings)


def create_agent_home(home: Path, config: AgentConfig, policy: Policy) -> PublicKeys:
    """Create an agent's home, or update the settings and the policy of one that is there; its keys stay.

    Returns:
        The public keys, for an administrator to enroll.

    Raises:
        UnsafeStorage: the folder is open to others.
        BadData, InvalidSetting: its keys cannot be read.
    """
    check_party_id(config.agent_id, "agent_id")
    make_home(home)
    replace_file(home / AGENT_FILE, settings_toml(config), mode=0o600)
    replace_file(home / POLICY_FILE, policy_toml(policy).encode(), mode=0o600)
    return _keys(home)


def create_tallier_home(home: Path, config: TallierConfig) -> PublicKeys:
    """Create a tallier's home, or update the settings of one that is there; see `create_agent_home`."""
    check_party_id(config.tallier_id, "tallier_id")
    make_home(home)
    replace_file(home / TALLIER_FILE, settings_toml(config), mode=0o600)
    return _keys(home)


def read_agent_config(home: Path) -> AgentConfig:
    """Read the settings of an agent.

    Raises:
        InvalidSetting: the file is missing, no TOML, or a field is unknown, missing or out of bounds.
        UnsafeStorage: the home is open to others.
    """
    return read_settings(home, AGENT_FILE, AgentConfig)


def read_tallier_config(home: Path) -> TallierConfig:
    """Read the settings of a tallier; see `read_agent_config`."""
    return read_settings(home, TALLIER_FILE, TallierConfig)


@overload
def path_in_home(home: Path, written: str) -> str: ...
@overload
def path_in_home(home: Path, written: None) -> None: ...
def path_in_home(home: Path, written: str | None) -> str | None:
    """Resolve a path of a settings file: in the home if it is there, so that a home can be moved; else as written."""
    return written if written is None or not (home / written).exists() else str(home / written)


def witness_of(home: Path, config: AgentConfig) -> Path | None:
    """Return the file outside the home that keeps the journal's furthest state; None where there is none.

    Raises:
        InvalidSetting: the path is not absolute, or its folder is not there (a disk that is not mounted). Also if it
            lies in the home, so that it would be restored along with it.
    """
    if config.witness_file is None:
        return None
    path = Path(config.witness_file)
    if not path.is_absolute() or path.resolve().is_relative_to(home.resolve()):
        raise InvalidSetting(
            "witness_file must be an absolute path outside the home: what lies in it goes back with it"
        )
    if not path.parent.is_dir():
        raise InvalidSetting(
            f"the folder of witness_file ({path.name}) is not there; mount its disk. Nothing is answered without it: "
            "nobody could tell whether this home is the newest"
        )
    return path


def make_home(home: Path) -> None:
    """Create a home's folder if there is none.

    Raises:
        UnsafeStorage: it is there and open to others.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(home)


def _check_private(home: Path) -> None:
    if not home.is_dir():
        raise InvalidSetting(f"there is no home folder {home.name!r}; make it first")
    mode = stat.S_IMODE(home.stat().st_mode)
    if mode & 0o077:
        raise UnsafeStorage(
            f"the home {home.name!r} has permissions {mode:04o}; others could read its secrets: chmod 700"
        )


def _keys(home: Path) -> PublicKeys:
    path = home / KEYS_FILE
    if not path.exists():
        PartyKeys.generate().save(path)
    return PartyKeys.load(path).public


def read_settings(home: Path, name: str, kind: type[C]) -> C:
    """Read a settings file of a home; raises as `read_agent_config` does."""
    _check_private(home)
    try:
        data = read_named(home / name, most_bytes=_MAX_SETTINGS_BYTES)
    except OSError as error:
        raise InvalidSetting(
            f"{name} cannot be read in {home.name!r} ({error.strerror}); is it the right home?"
        ) from None
    return SettingsText.of(data, name).check(kind)


def settings_toml(config: Settings) -> bytes:
    """Write settings as a file that reads back as these settings."""
    return toml_text(config.model_dump(exclude_none=True)).encode()
