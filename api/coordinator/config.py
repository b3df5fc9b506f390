"""The coordinator's settings: a TOML file in its home, documented field by field, unknown fields refused.

Every field with its default is listed in `docs/coordinator.md`; a test holds the two together. Budgets have no default:
an operator writes a number, or the word "unlimited", and so knows which of the two it is.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from labeler.budget import LEAST_DELTA, MOST_DELTA, MOST_EPSILON, budget_for
from labeler.errors import InvalidSetting
from labeler.settings import SettingsText
from labeler.system.files import read_named
from labeler.task import MOST_CLASSES, Level

MAX_CAP_EPSILON = MOST_EPSILON
"""A larger cap would promise nothing; `unlimited` says so openly."""

Cap = Annotated[float, Field(gt=0, le=MAX_CAP_EPSILON, allow_inf_nan=False)] | Literal["unlimited"]
Seconds = Annotated[float, Field(gt=0, le=366 * 86_400, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class CapsTable(_Table):
    """`[federation]` and `[agents]`: the most that an account may spend, for ever.

    Attributes:
        instance_epsilon: for one record, at the file's delta, or "unlimited".
        agent_epsilon: for one agent's whole data, at the file's delta, or "unlimited".
        life_epsilon: what of `instance_epsilon` is set aside, once and for ever, for tasks with votes for life; none is
            made where it is absent.
    """

    instance_epsilon: Cap
    agent_epsilon: Cap
    life_epsilon: Annotated[float, Field(gt=0, le=MAX_CAP_EPSILON, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _life_is_a_part(self) -> CapsTable:
        if self.life_epsilon and self.instance_epsilon != "unlimited" and self.life_epsilon > self.instance_epsilon:
            raise ValueError("life_epsilon is a part of instance_epsilon, so it cannot be larger")
        return self

    def life_nano(self, delta: float) -> int | None:
        """B, nano-units of mu^2; None where nothing is set aside.

        Raises:
            InvalidSetting: the epsilon is too small for any vote.
        """
        if self.life_epsilon is None:
            return None
        # Loaded where it is wanted: few federations cast votes for life.
        from labeler.accounting.lifetime import set_aside_nano

        return set_aside_nano(budget_for(self.life_epsilon, delta))

    def cap_nano(self, level: Level, delta: float) -> int | None:
        """The cap of one level in nano-units of mu^2, rounded down; None where it is not limited."""
        cap = self.instance_epsilon if level == "instance" else self.agent_epsilon
        return None if cap == "unlimited" else budget_for(cap, delta)


class LimitsTable(_Table):
    """`[limits]`: how much one request may bring.

    Attributes:
        max_images: images, or feature vectors, of one job.
        max_upload_bytes: of one job's content, after unpacking.
        max_image_bytes: of one image file.
        max_pixels: of one image, width times height.
        max_job_pixels: of all images of one job together.
        max_feature_dimension: entries of one feature vector.
        max_requests_per_minute: of one token.
        max_connections: open at once, of everybody; a few more are kept for questions about health.
        max_connections_per_address: open at once, of one client address; behind a trusted proxy, requests at once.
        max_unasked_jobs_per_day: of one token: jobs that ended after agents had said whether they will, and before
            anybody was asked. Such a job costs nothing, and leaves entries in every site's ledger for ever. What it
            tells of their budgets the sites bound themselves (labeler.ledger.promises).
    """

    max_images: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    max_upload_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2 * 2**30
    max_image_bytes: Annotated[int, Field(ge=1, le=2**30)] = 32 * 2**20
    max_pixels: Annotated[int, Field(ge=1, le=2**31)] = 64_000_000
    max_job_pixels: Annotated[int, Field(ge=1, le=2**50)] = 8_000_000_000
    max_feature_dimension: Annotated[int, Field(ge=1, le=2**20)] = 16_384
    max_requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] = 600
    max_connections: Annotated[int, Field(ge=16, le=100_000)] = 1000
    max_connections_per_address: Annotated[int, Field(ge=1, le=100_000)] = 256
    max_unasked_jobs_per_day: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000


class TimingTable(_Table):
    """`[timing]`: how long the coordinator waits.

    Attributes:
        job_deadline_s: for a job that names no deadline.
        patience_s: how long a round that has its quorum, or cannot reach it, waits for the agents still missing.
        ask_again_s: after which whoever has not answered is asked again.
        live_s: a party heard of within this counts as there.
    """

    job_deadline_s: Seconds = 86_400.0
    patience_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 5.0
    ask_again_s: Seconds = 5.0
    live_s: Seconds = 60.0


class RetentionTable(_Table):
    """`[retention]`: what an ended job leaves, and for how long.

    Attributes:
        questions_s: upload, features and questions of a completed job; its labels are put into one file before.
        labels_s: the label file, and what the journal keeps of the job's rounds that nobody needs any more.
    """

    questions_s: Annotated[float, Field(ge=0, le=366 * 86_400, allow_inf_nan=False)] = 600.0
    labels_s: Annotated[float, Field(ge=0, le=100 * 366 * 86_400, allow_inf_nan=False)] = 2_592_000.0


class CoordinatorConfig(_Table):
    """A whole `coordinator.toml`.

    Attributes:
        home: the folder of everything the coordinator keeps; the file's own folder when absent.
        journal: a SQLite file in the home, or a postgresql:// URL. May hold a password, so it is never printed.
        redis_url: of the redis-server, which only the coordinator and its embedder reach. Never printed either.
        public_url: where agents, talliers and people reach the coordinator.
        metrics: who may read /metrics: whoever shows a "token", or anybody ("open"), where nothing but a scraper on a
            closed network reaches the port.
        telemetry: whether spans of jobs and rounds go to OpenTelemetry ("otlp"); see api.coordinator.telemetry.
        delta: the failure probability at which every budget is stated.
        talliers: parties that hold one secret share of each ballot: 3, or 2.
        classes: class names of tasks that name none; what the agents report when absent.
        federation: caps of the account of everybody together.
        agents: caps of each agent's account.
        trusted_proxies: addresses or networks of the proxies in front; X-Forwarded-For is believed from them alone.
        backbones: fingerprint -> what `labeler embed --backbone` takes; a relative path is looked for in the home.
        limits, timing, retention: see there.
    """

    home: Path
    journal: Annotated[str, Field(min_length=1, repr=False)] = "journal.db"
    redis_url: Annotated[str, Field(min_length=1, repr=False)]
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")]
    delta: Annotated[float, Field(ge=LEAST_DELTA, le=MOST_DELTA, allow_inf_nan=False)] = 1e-5
    metrics: Literal["token", "open"] = "token"
    telemetry: Literal["off", "otlp"] = "off"
    talliers: Literal[2, 3] = 3
    classes: Annotated[tuple[str, ...], Field(min_length=2, max_length=MOST_CLASSES)] | None = None
    federation: CapsTable
    agents: CapsTable
    trusted_proxies: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    backbones: dict[str, str] = {}
    limits: LimitsTable = LimitsTable()
    timing: TimingTable = TimingTable()
    retention: RetentionTable = RetentionTable()

    @field_validator("classes")
    @classmethod
    def _classes_differ(cls, classes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if classes is not None and (len(set(classes)) != len(classes) or not all(classes)):
            raise ValueError("class names must be different from each other, and none empty")
        return classes

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, written: tuple[str, ...]) -> tuple[str, ...]:
        for one in written:
            if ipaddress.ip_network(one).prefixlen == 0:
                raise ValueError(f"{one} is everybody; name the addresses of your own proxies")
        return written

    @property
    def journal_target(self) -> str | Path:
        """What `labeler.ledger.database.open_database` takes: the URL, or the file in the home."""
        return self.journal if "://" in self.journal else self.home / self.journal

    def backbone(self, fingerprint: str) -> str | None:
        """What loads the backbone of a fingerprint: a path where there is such a file in the home, else as written."""
        written = self.backbones.get(fingerprint)
        if written is None:
            return None
        path = self.home / written
        return str(path) if path.exists() else written


def read_config(path: Path) -> CoordinatorConfig:
    """Read and check a settings file.

    Raises:
        InvalidSetting: it cannot be read, is no TOML, or a field is unknown, missing or out of bounds.
    """
    try:
        text = SettingsText.of(read_named(path), f"settings file {path.name}")
    except OSError as error:
        raise InvalidSetting(f"cannot read settings file {path.name}: {error.strerror}") from None
    home = path.parent.resolve()
    written = text.fields.get("home")
    place = home / written if isinstance(written, str) else (home if written is None else written)
    return text.check(CoordinatorConfig, text.fields | {"home": place})
