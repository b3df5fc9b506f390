"""A whole federation in one folder, for one machine: keys, settings, policies, shards, and its first token.

    HOME/
      federation.json       what it is; written last when it is made.
      admin-token           the administrator's token, which every start prints.
      processes.json        process id by name, while it runs.
      coordinator/          home of the coordinator and of the embedder.
      agents/agent-1/ ..    home of an agent, with its shard.
      talliers/tallier-0/ ..
      redis/                the folder of redis-server.
      examples/             public images and a task to try it with.
      logs/                 one file per process, JSON lines.

Before its coordinator starts, its parties are enrolled in the coordinator's journal, which no other process has open at
that time (`prepare_journal`). So all roles can start at once: none of them is turned away.

An interruption is safe at any step, and the next call continues: every file is written once, keys are never made twice.
A person's later edits of a settings file or a policy stay; only addresses are rewritten.

Its agents hold the user's shards, or real digits dealt to them. Digits are embedded by their own pixels (`pixels:8`),
which takes a second and no learning library. So a trial federation starts at once. Any other backbone may be named.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from feature_store.backbones import BackboneSpec, load_backbone, read_spec
from feature_store.backbones.spec import packaged_name
from feature_store.embedding import embed_source
from feature_store.shard import Shard, check_served
from labeler.errors import BadData, InvalidSetting, JournalInUse, LabelerError, MixedShards, ProtocolViolation
from labeler.ledger.database import Database, open_database
from labeler.ledger.parties import PartyStore, Role
from labeler.ledger.tokens import TokenStore
from labeler.methods import DEFAULT_METHOD, METHODS
from labeler.setting import DEFAULT_DELTA
from labeler.settings import describe_validation, same_names
from labeler.system.files import replace_file
from labeler.system.keys import PartyKeys, PublicKeys
from workers.agent.policy import AllowTable, BudgetTable, CoordinatorTable, Policy, toml_value
from workers.homes.new import coordinator_toml, journal_of, public_document, set_line
from workers.party.home import (
    AGENT_FILE,
    ANCHOR_FILE,
    COORDINATOR_FILE,
    KEYS_FILE,
    TALLIER_FILE,
    AgentConfig,
    TallierConfig,
    create_agent_home,
    create_tallier_home,
)
from workers.tallier.peers import make_identity, pin_peers, public_part
from workers.up import FederationPlan
from workers.winner.session import free_ports

TALLIERS: Final = 3
STATE_FILE: Final = "federation.json"
TOKEN_FILE: Final = "admin-token"
LOOPBACK: Final = "127.0.0.1"
AGENTS: Final = 5
INSTANCE_EPSILON: Final = 10.0
MAX_QUERIES_PER_DAY: Final = 100_000
FIRST_TOKEN: Final = "first administrator"
_ENDING_S = 5.0
_AGAIN_S = 0.05
LIFE_JOB_SHARE: Final = 0.25
"""The share of an image's lifetime spend on votes for life that one job may take, in new homes."""


class _State(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["labeler-federation/1"] = "labeler-federation/1"
    agents: Annotated[int, Field(ge=1)]
    has_examples: bool


class LocalFederation:
    """A federation on disk; created or reopened by `make_federation`, by one process at a time.

    Attributes:
        talliers: home by name, in tallier order.
    """

    def __init__(self, home: Path, state: _State) -> None:
        self.home = home
        self._state = state
        self.coordinator = home / "coordinator"
        self.redis = home / "redis"
        self.logs = home / "logs"
        self.agents = agent_homes(home, state.agents)
        self.talliers = tallier_homes(home)

    @property
    def examples(self) -> Path | None:
        """The folder of public images and a task to try the service with; None where none were made."""
        return self.home / "examples" if self._state.has_examples else None

    def set_addresses(self, *, url: str, redis_url: str) -> None:
        """Write the addresses of the coordinator and redis-server into every home; the rest of the files stays."""
        settings = self.coordinator / COORDINATOR_FILE
        set_line(settings, "public_url", url)
        set_line(settings, "redis_url", redis_url)
        for path in self.agents.values():
            set_line(path / AGENT_FILE, "coordinator_url", url)
        for path in self.talliers.values():
            set_line(path / TALLIER_FILE, "coordinator_url", url)
        introduce_talliers(self.talliers)


def agent_homes(home: Path, agents: int) -> dict[str, Path]:
    """Return the home of every agent by name."""
    return {f"agent-{number}": home / "agents" / f"agent-{number}" for number in range(1, agents + 1)}


def tallier_homes(home: Path) -> dict[str, Path]:
    """Return the home of every tallier by name, in tallier order."""
    return {f"tallier-{number}": home / "talliers" / f"tallier-{number}" for number in range(TALLIERS)}


def make_federation(home: Path, plan: FederationPlan) -> LocalFederation:
    """Create a federation in a folder, or reopen the one that is there.

    Raises:
        InvalidSetting: the plan contradicts itself or what is there.
        BadData: the folder holds something else, or a file of it is damaged.
        MixedShards: the shards do not belong together.
    """
    state = _read_state(home)
    if state is not None:
        _check_unchanged(home, state, plan)
        return LocalFederation(home, state)
    ours = {"coordinator", "agents", "talliers", "redis", "logs", "examples", "inputs", ".lock", TOKEN_FILE}
    if strange := sorted(path.name for path in home.iterdir() if path.name not in ours):
        raise BadData(f"{home} holds something else ({strange[0]}); choose an empty folder for a new federation")
    budget = _budget(plan)  # before anything is made: a half-made folder is no home
    homes = agent_homes(home, _number_of_agents(plan))
    parties = (*homes.values(), *tallier_homes(home).values())
    for folder in (*(home / name for name in ("coordinator", "redis", "logs", "agents", "talliers")), *parties):
        folder.mkdir(mode=0o700, exist_ok=True)
    if plan.shards:
        data = bring_shards(plan.shards, plan.backbone, coordinator=home / "coordinator")
    else:
        data = deal_digits(home, list(homes.values()), plan.backbone)
    _make_homes(home, homes, data, budget)
    state = _State(agents=len(homes), has_examples=not plan.shards)
    replace_file(home / STATE_FILE, json.dumps(state.model_dump(), indent=1).encode(), mode=0o600)
    return LocalFederation(home, state)


def introduce_talliers(homes: Mapping[str, Path]) -> None:
    """Let the talliers of this machine find winners together: addresses that are free now, the same in every home.

    A certificate is made once.
    """
    paths = list(homes.values())
    listens = [f"{LOOPBACK}:{port}" for port in free_ports(len(paths))]
    documents = []
    for number, (name, path) in enumerate(homes.items()):
        public = public_document(_public(path), party_id=name, role="tallier", tallier=number)
        make_identity(path, tallier_id=name, number=number, listen=listens[number])
        documents.append(public | public_part(path))
    for number, path in enumerate(paths):
        pin_peers(path, [document for document in documents if document["tallier"] != number])


def _make_homes(home: Path, agents: dict[str, Path], data: FederationData, budget: BudgetTable) -> None:
    coordinator = home / "coordinator"
    if not (coordinator / KEYS_FILE).exists():
        PartyKeys.generate().save(coordinator / KEYS_FILE)
    public = _public(coordinator)
    url = "http://127.0.0.1:8080"  # rewritten whenever the federation starts
    text = coordinator_toml(
        public_url=url,
        redis_url="redis://127.0.0.1:6379",
        delta=DEFAULT_DELTA,
        instance_epsilon=budget.instance_epsilon,
        agent_epsilon=budget.agent_epsilon,
        classes=data.classes,
        backbones={data.fingerprint: data.backbone} if data.backbone else {},
        ask_again_s=2.0,
        life_epsilon=budget.life_epsilon,
    )
    replace_file(coordinator / COORDINATOR_FILE, text.encode(), mode=0o600)
    pins: dict[str, str] = {}
    for name, path in tallier_homes(home).items():
        config = TallierConfig(
            tallier_id=name,
            coordinator_url=url,
            coordinator_verify_key=public.verify_key,
            coordinator_seal_key=public.seal_key,
        )
        pins[name] = create_tallier_home(path, config).seal_key
    policy = Policy(
        budget=budget,
        allow=AllowTable(
            backbones=(data.fingerprint,),
            tasks="any",
            methods=tuple(METHODS),
            releases=("histogram", "winner"),
            max_queries_per_day=MAX_QUERIES_PER_DAY,
            max_noise_contributors=len(agents),
            max_noise_talliers=2,
            approval=False,
            # Written only where it is set: a version that does not know the field can then read every other file.
            life_job_share=None if budget.life_epsilon is None else LIFE_JOB_SHARE,
        ),
        talliers=pins,
        coordinator=CoordinatorTable(verify_key=public.verify_key),
    )
    for (name, path), shard in zip(agents.items(), data.shards, strict=True):
        create_agent_home(path, AgentConfig(agent_id=name, coordinator_url=url, shard=str(shard)), policy)


def _budget(plan: FederationPlan) -> BudgetTable:
    """Return the budgets of all accounts.

    Raises:
        InvalidSetting: the epsilons are not valid, or do not go together.
    """
    try:
        return BudgetTable(
            instance_epsilon=INSTANCE_EPSILON if plan.instance_epsilon is None else plan.instance_epsilon,
            agent_epsilon="unlimited",
            delta=DEFAULT_DELTA,
            life_epsilon=plan.life_epsilon,
        )
    except ValidationError as error:
        raise InvalidSetting(describe_validation(error, "budget")) from None


def _number_of_agents(plan: FederationPlan) -> int:
    if not plan.shards:
        from workers.digits import check_agents

        agents = AGENTS if plan.agents is None else plan.agents
        check_agents(agents)
        return agents
    if plan.agents not in (None, len(plan.shards)):
        raise InvalidSetting(
            f"every agent has one shard: {plan.agents} agents and {len(plan.shards)} shards were named"
        )
    return len(plan.shards)


def _check_unchanged(home: Path, state: _State, plan: FederationPlan) -> None:
    """Refuse a plan that changes what was settled when the federation was made."""
    if plan.agents not in (None, state.agents):
        raise InvalidSetting(
            f"the federation in {home} has {state.agents} agents, not {plan.agents}; add one with `labeler agent init` "
            "and `labeler keys enrol`, and raise max_noise_contributors in agents/*/policy.toml; or make another "
            "federation with --home"
        )
    asked = [
        option
        for option, value in (
            ("--shard", plan.shards),
            ("--backbone", plan.backbone),
            ("--instance-epsilon", plan.instance_epsilon),
            ("--life-epsilon", plan.life_epsilon),
        )
        if value
    ]
    if asked:
        raise InvalidSetting(
            f"{asked[0]} is fixed when a federation is made, and there is one in {home}; change its settings files "
            "(coordinator/coordinator.toml, agents/*/policy.toml), or make another federation with --home"
        )


def _public(home: Path) -> PublicKeys:
    try:
        return PartyKeys.load(home / KEYS_FILE).public
    except LabelerError as error:
        raise type(error)(f"{home.name}: {error}") from None


def _read_state(home: Path) -> _State | None:
    path = home / STATE_FILE
    try:
        return _State.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, ValidationError):
        raise BadData(f"{path} is damaged; restore it from a backup of the home") from None


# Its coordinator's journal, before that coordinator starts.


def prepare_journal(federation: LocalFederation) -> tuple[str, bool]:
    """Enrol the federation's parties in its coordinator's journal, and find or make its administrator's token.

    A party that an administrator revoked stays revoked, and is turned away. The token is kept in a file of the home, so
    that every start prints the same one. The file gives the home's owner no new access: the keys of every party are in
    the same home.

    Returns:
        The token, and whether it was made now.

    Raises:
        BadData: a party's keys are not those that were enrolled.
        JournalInUse: a coordinator runs on this home.
    """
    with closing(_journal(federation.coordinator)) as database:
        parties, numbers = PartyStore(database), {name: number for number, name in enumerate(federation.talliers)}
        with database.write() as connection:
            revoked = {one.party_id for one in parties.list(connection=connection) if one.state == "revoked"}
            for name, home in (federation.talliers | federation.agents).items():
                if name in revoked:
                    continue
                keys = _public(home)
                role: Role = "tallier" if name in numbers else "agent"
                known = (keys.verify_key, keys.seal_key)
                try:
                    parties.enrol(name, role, *known, tallier=numbers.get(name), connection=connection)
                except ProtocolViolation as error:
                    raise BadData(f"{name} cannot be enrolled: {error}") from None
        store, file = TokenStore(database), federation.home / TOKEN_FILE
        try:
            kept = file.read_text(encoding="ascii").strip() if file.exists() else ""
        except (OSError, UnicodeDecodeError):
            raise BadData(f"{file} cannot be read; remove it, and a new token is made") from None
        if kept and store.find(kept) is not None:
            return kept, False
        # A lost token stays valid; a revoked one does not, and another file would print it again.
        made = store.create(FIRST_TOKEN, "admin")[1]
        replace_file(file, f"{made}\n".encode(), mode=0o600)
        return made, True


def _journal(home: Path) -> Database:
    """Open the coordinator's journal. Right after an earlier supervisor was killed, its coordinator may still be
    ending.
    """
    until = time.monotonic() + _ENDING_S
    while True:
        try:
            return open_database(journal_of(home), anchor=home / ANCHOR_FILE)
        except JournalInUse:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


DIGITS_BACKBONE: Final = "pixels:8"
SHARD_NAME: Final = "images.shard"
EXAMPLE_IMAGES: Final = 200
MAX_DIGITS: Final = 2000
"""The bound that every agent with digits declares: there are fewer digits than this."""

BACKBONE_FILE: Final = "backbone.toml"

EXAMPLE_TASK: Final = f"""# What the examples ask, by the default method ({DEFAULT_METHOD}):
# every private digit votes at the one question nearest to it.
[task]
name = "handwritten digits"
epsilon = 0.5               # the price of one job, per private image

[queries]
strategy = "clustered"      # one question per group of similar images
count = 20
"""


@dataclass(frozen=True)
class FederationData:
    """The agents' data, and the backbone that embeds a requester's images.

    Attributes:
        shards: one per agent.
        classes: public class names.
        backbone: what the coordinator's settings name for it; empty where nobody here can load it.
    """

    shards: tuple[Path, ...]
    classes: tuple[str, ...]
    fingerprint: str
    backbone: str


def deal_digits(home: Path, agents: Sequence[Path], backbone: str | None) -> FederationData:
    """Deal the digits, embed them into each agent's home, and put public ones into HOME/examples.

    Raises:
        InvalidSetting: more agents than digits can be dealt to, or an unknown backbone.
    """
    from workers.digits import CLASSES, write_digits, zip_images

    spec = read_spec(backbone or DIGITS_BACKBONE)
    inputs, examples = home / "inputs", home / "examples"
    inputs.mkdir(mode=0o700, exist_ok=True)
    examples.mkdir(mode=0o700, exist_ok=True)
    parts = write_digits(inputs, seed=0, agents=len(agents))
    embedder = load_backbone(spec)
    for agent in agents:
        embed_source(parts[agent.name], embedder, agent / SHARD_NAME, classes=CLASSES, max_records=MAX_DIGITS)
    zip_images(parts["public"], examples / "digits.zip", count=EXAMPLE_IMAGES)
    replace_file(examples / "task.toml", EXAMPLE_TASK.encode())
    shutil.rmtree(inputs)
    return FederationData(
        shards=tuple(Path(SHARD_NAME) for _ in agents),
        classes=CLASSES,
        fingerprint=embedder.fingerprint,
        backbone=_describe(spec, home / "coordinator"),
    )


def bring_shards(paths: Sequence[Path], backbone: str | None, *, coordinator: Path) -> FederationData:
    """Use shards in place; they must be private, of one backbone and one class list.

    Raises:
        MixedShards: they differ in backbone or classes, or were made by another backbone than the one named.
        InvalidSetting: one is public, declares no bound or is named twice, or the backbone has to be named.
    """
    shards = [Shard.open(path) for path in paths]
    if len({path.resolve() for path in paths}) != len(paths):
        raise InvalidSetting("a shard is named twice; every agent has records of its own")
    for shard in shards:
        check_served(shard)
    for path, shard in zip(paths[1:], shards[1:], strict=True):
        if shard.fingerprint != shards[0].fingerprint or not same_names(shard.classes, shards[0].classes):
            raise MixedShards(f"{path} and {paths[0]} differ in backbone or class list; embed them alike")
    if shards[0].probe is not None and backbone is None:  # requesters bring features, too
        paths = tuple(path.resolve() for path in paths)
        return FederationData(paths, shards[0].classes, shards[0].fingerprint, "")
    spec = _named_in(shards[0].backbone) if backbone is None else read_spec(backbone)
    fingerprint = load_backbone(spec).fingerprint
    if fingerprint != shards[0].fingerprint:
        raise MixedShards(
            f"the shards were made by backbone {shards[0].fingerprint[:16]}, not by the named {fingerprint[:16]}; "
            "name the backbone that made them (--backbone)"
        )
    return FederationData(
        shards=tuple(path.resolve() for path in paths),
        classes=shards[0].classes,
        fingerprint=fingerprint,
        backbone=_describe(spec, coordinator),
    )


def _named_in(manifest: dict[str, Any]) -> BackboneSpec:
    """Return the backbone of a shard where its manifest says all about it: pixels, and those that come with the
    program.
    """
    packaged = packaged_name(str(manifest.get("weights", "")))
    if packaged is not None:
        return BackboneSpec(kind="packaged", architecture=packaged)
    if manifest.get("kind") != "pixels":
        raise InvalidSetting("name the backbone the shards were made with (--backbone), so that images can be embedded")
    transform = manifest["transform"]
    return BackboneSpec(kind="pixels", options={"size": transform["resize"], "channels": len(transform["mean"])})


def _describe(spec: BackboneSpec, coordinator: Path) -> str:
    """Write a backbone file next to the coordinator's settings, and return its name."""
    lines = [f"kind = {toml_value(spec.kind)}"]
    if spec.architecture:
        lines.append(f"architecture = {toml_value(spec.architecture)}")
    if spec.weights is not None:
        lines.append(f"weights = {toml_value(str(spec.weights.resolve()))}")
    tables = [("options", dict(spec.options))]
    if isinstance(spec.transform, str):
        lines.append(f"transform = {toml_value(spec.transform)}")
    elif spec.transform is not None:
        tables.append(("transform", spec.transform.model_dump()))
    for name, fields in tables:
        if fields:
            plain = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
            lines += [f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in plain.items())]
    replace_file(coordinator / BACKBONE_FILE, ("\n".join(lines) + "\n").encode())
    return BACKBONE_FILE
