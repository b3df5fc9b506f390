"""The coordinator's settings, from a TOML file in its home. Every field is documented; unknown fields are refused.

`docs/coordinator.md` lists every field with its default; a test keeps the two in step. Budgets have no default: an
operator writes a number or the word "unlimited", and so makes the choice knowingly.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from labeler.budget import LEAST_DELTA, MOST_DELTA
from labeler.caps import CapsTable
from labeler.errors import InvalidSetting
from labeler.setting import DEFAULT_DELTA
from labeler.settings import SettingsText
from labeler.system.files import read_named
from labeler.task import MOST_CLASSES

Seconds = Annotated[float, Field(gt=0, le=366 * 86_400, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class LimitsTable(_Table):
    """`[limits]`: how much one request may bring.

    Attributes:
        max_images: images, or feature vectors, of one job.
        max_upload_bytes: of one job's content, after unpacking.
        max_token_bytes: of one token's uploads together, those kept and those that arrive.
        max_image_bytes: of one image file.
        max_pixels: of one image, width times height.
        max_job_pixels: of all images of one job together.
        max_feature_dimension: entries of one feature vector.
        max_requests_per_minute: of one token.
        max_connections: open at once, from all clients; a few more are reserved for health checks.
        max_connections_per_address: open at once, from one client address. Behind a trusted proxy it bounds requests.
        max_unasked_jobs_per_day: of one token: jobs that wait for a first agent to be asked, and those that ended
            before, however they ended. Such a job costs nothing but stays in the journal, and in those of the
            sites that had replied. The sites themselves bound what it reveals of their budgets
            (labeler.ledger.promises).
    """

    max_images: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    max_upload_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2 * 2**30
    max_token_bytes: Annotated[int, Field(ge=1, le=2**50)] = 4 * 2**30
    max_image_bytes: Annotated[int, Field(ge=1, le=2**30)] = 32 * 2**20
    max_pixels: Annotated[int, Field(ge=1, le=2**31)] = 64_000_000
    max_job_pixels: Annotated[int, Field(ge=1, le=2**50)] = 8_000_000_000
    max_feature_dimension: Annotated[int, Field(ge=1, le=2**20)] = 16_384
    max_requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] = 600
    max_connections: Annotated[int, Field(ge=16, le=100_000)] = 1000
    max_connections_per_address: Annotated[int, Field(ge=1, le=100_000)] = 256
    max_unasked_jobs_per_day: Annotated[int, Field(ge=1, le=1_000_000)] = 1000

    @model_validator(mode="after")
    def _one_job_fits(self) -> LimitsTable:
        if self.max_token_bytes < self.max_upload_bytes:
            raise ValueError(
                f"max_token_bytes is {self.max_token_bytes}, less than the {self.max_upload_bytes} of one job "
                "(max_upload_bytes); raise it, or lower the other"
            )
        return self


class TimingTable(_Table):
    """`[timing]`: how long the coordinator waits.

    Attributes:
        job_deadline_s: the deadline of a job that names none.
        patience_s: how long a round that has its quorum, or cannot reach it, waits for the missing agents.
        ask_again_s: time until a party that has not answered is asked again.
        live_s: a party heard from within this time counts as live.
    """

    job_deadline_s: Seconds = 86_400.0
    patience_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 5.0
    ask_again_s: Seconds = 5.0
    live_s: Seconds = 60.0


class RetentionTable(_Table):
    """`[retention]`: how long an ended job's data are kept.

    Attributes:
        questions_s: upload, features and questions of a completed job; its labels are first put into one file.
        labels_s: the label file, and those journal rows of the job's rounds that are no longer needed.
    """

    questions_s: Annotated[float, Field(ge=0, le=366 * 86_400, allow_inf_nan=False)] = 600.0
    labels_s: Annotated[float, Field(ge=0, le=100 * 366 * 86_400, allow_inf_nan=False)] = 2_592_000.0


class CoordinatorConfig(_Table):
    """A whole `coordinator.toml`.

    Attributes:
        home: the folder of everything the coordinator keeps; the file's own folder when absent.
        journal: a SQLite file in the home, or a postgresql:// URL. May hold a password, so it is never printed.
        redis_url: of the Redis or Valkey server, which only the coordinator and its embedder reach. Never printed
            either.
        public_url: where agents, talliers and people reach the coordinator.
        metrics: who may read /metrics: anybody with a token ("token"), or anybody ("open"). "open" fits a port that
            only a scraper on a closed network reaches.
        telemetry: whether spans of jobs and rounds go to OpenTelemetry ("otlp"); see api.coordinator.telemetry.
        delta: the failure probability of every stated budget.
        talliers: parties that hold one secret share of each ballot: 3, or 2.
        classes: class names for tasks that name none; when absent, the classes that the agents report.
        federation: caps of the whole federation's account.
        agents: caps of each agent's account.
        trusted_proxies: addresses or networks of the proxies in front; only their X-Forwarded-For is believed.
        backbones: fingerprint -> an argument of `labeler embed --backbone`; a relative path is looked up in the home.
        limits, timing, retention: see their tables.
    """

    home: Path
    journal: Annotated[str, Field(min_length=1, repr=False)] = "journal.db"
    redis_url: Annotated[str, Field(min_length=1, repr=False)]
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")]
    delta: Annotated[float, Field(ge=LEAST_DELTA, le=MOST_DELTA, allow_inf_nan=False)] = DEFAULT_DELTA
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
        """Return the argument of `labeler.ledger.database.open_database`: the URL, or the file in the home."""
        return self.journal if "://" in self.journal else self.home / self.journal

    def backbone(self, fingerprint: str) -> str | None:
        """Return a path or name that loads a backbone: the path if the home has such a file, else as written."""
        written = self.backbones.get(fingerprint)
        if written is None:
            return None
        path = self.home / written
        return str(path) if path.exists() else written


def read_config(path: Path) -> CoordinatorConfig:
    """Read and check a settings file.

    Raises:
        InvalidSetting: the file cannot be read, is not TOML, or a field is unknown, missing or out of bounds.
    """
    try:
        text = SettingsText.of(read_named(path), f"settings file {path.name}")
    except OSError as error:
        raise InvalidSetting(f"cannot read settings file {path.name}: {error.strerror}") from None
    home = path.parent.resolve()
    written = text.fields.get("home")
    place = home / written if isinstance(written, str) else (home if written is None else written)
    return text.check(CoordinatorConfig, text.fields | {"home": place})
