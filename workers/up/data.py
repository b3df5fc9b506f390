"""What the agents of a local federation hold: shards somebody brings, or real digits dealt to them.

Digits are embedded by their own pixels (`pixels:8`), which takes a second and no learning library, so a federation to
try things with starts at once; any other backbone may be named.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from feature_store.backbones import BackboneSpec, load_backbone, read_spec
from feature_store.backbones.spec import packaged_name
from feature_store.embedding import embed_source
from feature_store.shard import Shard, check_served
from labeler.errors import InvalidSetting, MixedShards
from labeler.system.files import replace_file
from workers.agent.policy import toml_value

DIGITS_BACKBONE: Final = "pixels:8"
SHARD_NAME: Final = "images.shard"
EXAMPLE_IMAGES: Final = 200
MAX_DIGITS: Final = 2000
"""The bound that every agent with digits declares: no more exist, rounded up."""

BACKBONE_FILE: Final = "backbone.toml"

EXAMPLE_TASK: Final = """# What the examples ask: every private digit votes at the one question nearest to it.
[task]
name = "handwritten digits"
method = "reverse-knn"
k = 1
epsilon = 0.5               # the price of one job, per private image
delta = 1e-5
colluding_agents = 1

[queries]
strategy = "clustered"      # one question per group of similar images
count = 20
"""


@dataclass(frozen=True)
class FederationData:
    """What agents hold and what embeds the images that are asked about.

    Attributes:
        shards: one per agent.
        classes: public class names.
        backbone: what the coordinator's settings name for it.
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
    """Use shards where they lie; they must be private, of one backbone and one class list.

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
        if (shard.fingerprint, shard.classes) != (shards[0].fingerprint, shards[0].classes):
            raise MixedShards(f"{path} and {paths[0]} differ in backbone or class list; embed them alike")
    spec = _named_in(shards[0].backbone) if backbone is None else read_spec(backbone)
    fingerprint = load_backbone(spec).fingerprint
    if fingerprint != shards[0].fingerprint:
        raise MixedShards(
            f"the shards were made by backbone {shards[0].fingerprint[:16]}, and the one named is {fingerprint[:16]}"
        )
    return FederationData(
        shards=tuple(path.resolve() for path in paths),
        classes=shards[0].classes,
        fingerprint=fingerprint,
        backbone=_describe(spec, coordinator),
    )


def _named_in(manifest: dict[str, Any]) -> BackboneSpec:
    """The backbone of a shard where its manifest says all about it: pixels, and what comes with the program."""
    packaged = packaged_name(str(manifest.get("weights", "")))
    if packaged is not None:
        return BackboneSpec(kind="packaged", architecture=packaged)
    if manifest.get("kind") != "pixels":
        raise InvalidSetting("name the backbone the shards were made with (--backbone), so that images can be embedded")
    transform = manifest["transform"]
    return BackboneSpec(kind="pixels", options={"size": transform["resize"], "channels": len(transform["mean"])})


def _describe(spec: BackboneSpec, coordinator: Path) -> str:
    """Write a backbone file beside the coordinator's settings, and return its name."""
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
            lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in fields.items())]
    replace_file(coordinator / BACKBONE_FILE, ("\n".join(lines) + "\n").encode())
    return BACKBONE_FILE


def _value(value: object) -> str:
    return toml_value(tuple(value) if isinstance(value, list) else value)
