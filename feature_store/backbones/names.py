"""Names of backbones that come with the program; apart, so that `labeler embed --help` loads nothing else."""

from __future__ import annotations

DEFAULT_BACKBONE = "efficientnet-lite0"
"""What `labeler embed` uses unless told otherwise."""

WEIGHTS_OF = {
    DEFAULT_BACKBONE: "efficientnet-lite0-57934424.pth",
    "efficientnet-lite2": "efficientnet-lite2-9656183e.pth",
}
"""The file of weights of each; their packages are in feature_store.backbones.packaged."""

PACKAGED = tuple(WEIGHTS_OF)


def packaged_name(weights: str) -> str | None:
    """The backbone whose manifest names this file of weights, if it is one of ours; its fingerprint decides."""
    return next((name for name, file in WEIGHTS_OF.items() if file == weights), None)
