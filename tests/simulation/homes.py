"""Homes of a whole federation, made once for each shape of it, and copied for every schedule."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.ledger.chain import EMPTY
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import set_aside
from labeler.ledger.parties import PartyStore
from labeler.ledger.sequences import Sequences
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.methods import ReleaseKind
from labeler.randomness import seeded_source
from labeler.setting import LEVELS
from labeler.system.keys import PartyKeys, PublicKeys
from labeler.system.site_key import KEY_BYTES, Digests, SiteKey
from labeler.task import Task, parse_task
from tests.simulation.contract import START, VirtualClock
from tests.simulation.parties import URL, MeetingRoom, boot_agent, boot_tallier, mark_records
from tests.simulation.subject import complete
from tests.simulation.ways import CLASSES, DIMENSION, LIFE_NANO, Way, attributes_of, fields_of, points
from workers.agent.policy import Policy
from workers.homes.new import PUBLIC_FILE, make_tallier_home, read_public
from workers.party.coordinator import CoordinatorDoor
from workers.party.home import JOURNAL_FILE, AgentConfig, create_agent_home
from workers.tallier.peers import pin_peers

RECORDS = 9
FINGERPRINT = "simulated-backbone"
REQUESTER = "tok-simulated"
_METHODS = ["knn", "reverse-knn", "federated", "ensemble", "blind-average", "aux-distill"]
_LIFE_EPSILON = 9.0
"""What sites set aside for votes for life: more than any task of them promises."""

MAX_RECORDS = 100
"""What every site declares, whatever world it is in."""

VARIANTS = ("all", "one-less", "one-more")
_LISTEN = "127.0.0.1:{port}"


@dataclass(frozen=True)
class Shape:
    """The common settings of federations of one template."""

    agents: int
    talliers: int
    release: ReleaseKind
    max_dropouts: int
    dishonest_talliers: int | None = None
    way: Way = "neighbours"


@dataclass(frozen=True)
class Template:
    """A federation that was never asked anything.

    Attributes:
        shape: of it.
        folder: its homes.
        tasks: digests of the tasks that requesters use.
        keys: of the coordinator and the talliers: the simulation may look into everything.
        spare: keys that an agent may be given later.
        policies: those that were made so far: they are read at every ask, and made of nothing that changes.
        contents: name, mode and bytes of every file, where a link leads, or None of a folder; read at the first copy.
    """

    shape: Shape
    folder: Path
    tasks: tuple[Task, ...]
    keys: Mapping[str, PartyKeys]
    spare: Mapping[str, PartyKeys]
    policies: dict[tuple[bool, bool], Policy] = field(default_factory=dict)
    contents: list[tuple[str, int, bytes | str | None]] = field(default_factory=list, repr=False)

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        return agent_names(self.shape.agents)

    @property
    def talliers(self) -> tuple[str, ...]:
        """Names of the talliers, in order."""
        return tallier_names(self.shape.talliers)

    def policy(self, *, is_open: bool = True, is_capped: bool = False) -> Policy:
        """Return what a site allows: everything that is asked here; with `is_open` False nothing any more."""
        name = (is_open, is_capped)
        if name not in self.policies:
            self.policies[name] = self._policy(*name)
        return self.policies[name]

    def _policy(self, is_open: bool, is_capped: bool) -> Policy:
        return Policy.model_validate(
            {
                "budget": {
                    # Covers about two queries of this noise.
                    "instance_epsilon": 380.0 if is_capped else "unlimited",
                    "agent_epsilon": "unlimited",
                    "delta": 1e-5,
                    **({"life_epsilon": _LIFE_EPSILON} if self.shape.way == "lives" else {}),
                },
                "allow": {
                    "backbones": [FINGERPRINT],
                    "tasks": "any",
                    "methods": [name for name in _METHODS if is_open or name != self.tasks[0].method],
                    "releases": ["histogram", "winner"],
                    "max_queries_per_day": 10_000,
                    "max_noise_contributors": 100,
                    "max_noise_talliers": 2,
                    "approval": False,
                },
                "talliers": {name: self.keys[name].public.seal_key for name in self.talliers},
                "coordinator": {"verify_key": self.keys["coordinator"].public.verify_key},
            }
        )

    def shard(self, agent: str, variant: str) -> Path:
        """The records of an agent: all of them, one less, or one more."""
        return self.folder.parent / "shards" / kind_of(self.shape.way) / agent / variant

    def copy(self, target: Path) -> None:
        """Copy every home, out of memory: a copy is written for every schedule, and the homes themselves are wanted
        once: a hundred shapes of them would fill a small /dev/shm."""
        if not self.contents:
            self.contents.extend(_contents(self.folder))
            shutil.rmtree(self.folder)
        target.mkdir(parents=True)
        for name, mode, held in self.contents:
            if isinstance(held, bytes):
                handle = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                os.write(handle, held)
                os.close(handle)
            elif held is None:
                (target / name).mkdir(mode)
            else:
                (target / name).symlink_to(held)


def kind_of(way: Way) -> str:
    """Return the kind of records that a way of asking needs."""
    return {"attributes": "attributes", "lives": "images"}.get(way, "labels")


def _contents(folder: Path) -> Iterator[tuple[str, int, bytes | str | None]]:
    """Everything in a folder, each folder before what is in it."""
    for path in sorted(folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        held = str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        yield str(path.relative_to(folder)), mode, held


def agent_names(count: int) -> tuple[str, ...]:
    """Names of the agents."""
    return ("east", "north", "west")[:count]


def tallier_names(count: int) -> tuple[str, ...]:
    """Names of the talliers."""
    return tuple(f"tallier-{number}" for number in range(count))


class Templates:
    """Templates by shape, made where they are first wanted.

    Args:
        folder: a new folder, best in memory.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._made: dict[Shape, Template] = {}

    def of(self, shape: Shape) -> Template:
        """The template of a shape."""
        if shape not in self._made:
            _make_shards(self._folder / "shards")
            self._made[shape] = _make(self._folder / f"template-{len(self._made)}", shape, _blank(self._folder))
            complete(self._made[shape].folder / "coordinator")
        return self._made[shape]


class _NoDoor:
    """A party that is only made talks to nobody."""

    def post(self, path: str, data: bytes) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        """See CoordinatorDoor."""


def _blank(folder: Path) -> Path:
    """A journal in which nothing was written yet, made once: its tables take longer than all else of a home."""
    journal = folder / "blank.db"
    if not journal.exists():
        open_database(journal, allow_unsynced=True).close()
    return journal


def _make(folder: Path, shape: Shape, blank: Path) -> Template:
    folder.mkdir()
    clock = VirtualClock()
    door: CoordinatorDoor = _NoDoor()
    keys = {"coordinator": PartyKeys.generate()}
    home = folder / "coordinator"
    home.mkdir(mode=0o700)
    (home / "jobs").mkdir(mode=0o700)
    keys["coordinator"].save(home / "keys.json")
    publics: dict[str, PublicKeys] = {}
    documents = []
    listens = _LISTEN.format
    for number, name in enumerate(tallier_names(shape.talliers)):
        make_tallier_home(
            folder / name,
            tallier_id=name,
            number=number,
            coordinator_url=URL,
            coordinator=keys["coordinator"].public,
            listen=listens(port=9000 + number),
        )
        documents.append(read_public(folder / name / PUBLIC_FILE))
        keys[name] = PartyKeys.load(folder / name / "keys.json")
        publics[name] = keys[name].public
    if shape.talliers == 3:
        for number, name in enumerate(tallier_names(shape.talliers)):
            pin_peers(folder / name, [one for other, one in enumerate(documents) if other != number])
    tasks = tuple(_task(shape, number) for number in range(2))
    template = Template(shape, folder, tasks, keys, {name: PartyKeys.generate() for name in agent_names(shape.agents)})
    for name in template.agents:
        config = AgentConfig(agent_id=name, coordinator_url=URL, shard="records", engine="numpy")
        publics[name] = create_agent_home(folder / name, config, template.policy())
        (folder / name / "records").symlink_to(template.shard(name, VARIANTS[0]))
    for name in ("coordinator", *template.agents, *template.talliers):
        shutil.copy2(blank, folder / name / JOURNAL_FILE)
    _make_journal(home, template, publics)
    for name in template.agents:
        boot_agent(folder / name, door=door, policy=template.policy, clock=clock).close()
    for name in template.talliers:
        boot_tallier(folder / name, door=door, room=MeetingRoom(), clock=clock).close()
    return template


def _make_journal(home: Path, template: Template, publics: Mapping[str, PublicKeys]) -> None:
    with open_database(home / "journal.db", anchor=home / "journal.head", allow_unsynced=True) as database:
        ledger, parties, tasks = Ledger(database, clock=VirtualClock().utc), PartyStore(database), TaskStore(database)
        Sequences(database)
        for account in ("federation", *(f"agent:{name}" for name in template.agents)):
            for level in LEVELS:
                ledger.open_account(account, level, None)
            if template.shape.way == "lives":
                set_aside(ledger, account, LIFE_NANO)
        facts = {"classes": list(CLASSES), "backbone_fingerprint": FINGERPRINT, "version": "labeler/0.2"}
        for number, name in enumerate(template.talliers):
            parties.enrol(name, "tallier", publics[name].verify_key, publics[name].seal_key, tallier=number)
        for name in template.agents:
            parties.enrol(name, "agent", publics[name].verify_key, publics[name].seal_key)
            parties.contact(name, START, facts, EMPTY)
        for task in template.tasks:
            tasks.add(TaskRecord(task, template.agents, START, REQUESTER))


def _task(shape: Shape, number: int) -> Task:
    return parse_task(
        {
            **fields_of(shape.way),
            "name": f"task {number}",
            "classes": CLASSES,
            "delta": 0.5,
            "release": shape.release,
            "agents": shape.agents,
            "max_dropouts": shape.max_dropouts,
            "talliers": shape.talliers,
            "dishonest_talliers": shape.dishonest_talliers,
            "backbone_fingerprint": FINGERPRINT,
            "nonce": f"simulated-{number}",
        }
    )


def _make_shards(folder: Path) -> None:
    if folder.exists():
        return
    for kind in ("labels", "attributes", "images"):
        for name in agent_names(3):
            for variant in VARIANTS:
                target = folder / kind / name / variant
                write_records(target, name, RECORDS + (variant == "one-more"), kind=kind)
                if variant == "one-less":
                    remove_first(target)


def image_digests(name: str, count: int) -> tuple[str, Digests]:
    """The name of an agent's site key, and digests of its images, of which the last but one is there twice."""
    key = SiteKey(seeded_source(f"site key {name}".encode()).bytes(KEY_BYTES))
    copied = [min(number, RECORDS - 2) if number < RECORDS else number for number in range(count)]
    return key.name, key.digests("image", [f"{name}/{number}".encode() for number in copied])


def write_records(target: Path, name: str, count: int, *, kind: str, is_wrong: bool = False) -> None:
    """Write the first records of an agent.

    Args:
        kind: "labels", "attributes", or "images", which the site knows again.
        is_wrong: every label and every attribute is another one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    labels = (np.arange(count) % len(CLASSES)).astype(np.int16)
    attributes = attributes_of(name, max(count, RECORDS + 1))[:count]
    if is_wrong:
        attributes, labels = 1 - attributes, (labels + 1) % np.int16(len(CLASSES))
    site_key, digests = image_digests(name, count) if kind == "images" else (None, None)
    with ShardWriter(
        target,
        classes=CLASSES,
        fingerprint=FINGERPRINT,
        dimension=DIMENSION,
        public=False,
        backbone={"kind": "pixels"},
        attributes=kind == "attributes",
        max_records=MAX_RECORDS,
        site_key=site_key,
        random_bytes=seeded_source(f"ids {name}".encode()).bytes,
    ) as writer:
        writer.append(
            points(max(count, RECORDS + 1), f"records {name}")[:count].astype(np.float64),
            attributes if kind == "attributes" else labels,
            [f"{name}/{number}.png" for number in range(count)],
            image_digests=digests,
        )
        writer.finish()
    mark_records(target, name)


def remove_first(target: Path) -> None:
    """Delete the first record of a shard."""
    shard = Shard.open(target)
    shard.delete(shard.record_ids[:1])
