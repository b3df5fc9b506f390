"""A SimCLR run on disk: one safetensors file with the weights, and what is needed to use or to continue them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save
from torch import Tensor

from labeler.errors import BadData

_FORMAT = "labeler-simclr/1"
_DESCRIBED = {"architecture", "options", "hidden", "projection", "feature", "transform"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A network during or after pretraining.

    Attributes:
        described: architecture, options, hidden, projection, feature and transform, as JSON values.
        run: digest of images, settings and seed; only the same run may be continued.
        epochs_done: how far it came.
        finished: whether that is all of it; only then it is a backbone.
        network: the tensors of encoder and head.
        moments: the optimizer's tensors, named INDEX.NAME; empty when finished.
    """

    described: Mapping[str, Any]
    run: str
    epochs_done: int
    finished: bool
    network: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file in one step, so that a crash leaves the earlier checkpoint whole."""
    tensors = {f"network.{name}": tensor.cpu().contiguous() for name, tensor in checkpoint.network.items()}
    tensors |= {f"moments.{name}": tensor.cpu().contiguous() for name, tensor in checkpoint.moments.items()}
    header = {
        "described": dict(checkpoint.described),
        "run": checkpoint.run,
        "epochs_done": checkpoint.epochs_done,
        "finished": checkpoint.finished,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(save(tensors, metadata={"format": _FORMAT, "header": json.dumps(header, sort_keys=True)}))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        BadData: no such file, no safetensors file, damaged, or not written by SimCLR pretraining here.
    """
    if not path.is_file():
        raise BadData(f"no checkpoint file {path.name!r} in the folder named; check the path")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise BadData(f"checkpoint {path.name!r} is no safetensors file, or damaged: {error}") from None
    try:
        header = json.loads(metadata["header"]) if metadata.get("format") == _FORMAT else None
        if header is None or header["described"].keys() != _DESCRIBED:
            raise KeyError
        return Checkpoint(
            header["described"],
            str(header["run"]),
            int(header["epochs_done"]),
            bool(header["finished"]),
            _under("network.", tensors),
            _under("moments.", tensors),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise BadData(
            f"{path.name!r} holds weights but no SimCLR checkpoint of this project; "
            'to use weights of another origin, write a backbone file with kind = "timm"'
        ) from None


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
