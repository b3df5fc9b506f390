"""Encoder and projection head of SimCLR, their checkpoint on disk, and the backbone made of them.

A checkpoint is one safetensors file with the weights, and what is needed to use or to continue them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn

from feature_store.backbones.network import NetworkBackbone, hash_weights, major_versions
from feature_store.backbones.spec import Transform
from labeler.errors import BadData, InvalidSetting


class SimCLRNetwork(nn.Module):
    """An encoder and a head of two linear layers.

    Attributes:
        encoder: image to representation, shape (n, representation).
        head: representation to projection.
        representation: dimension of the encoder's output.
    """

    def __init__(self, encoder: nn.Module, *, representation: int, hidden: int, projection: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.representation = representation
        self.head = nn.Sequential(nn.Linear(representation, hidden), nn.ReLU(), nn.Linear(hidden, projection))

    @classmethod
    def build(
        cls,
        architecture: str,
        options: dict[str, Any],
        *,
        channels: int,
        side: int,
        hidden: int,
        projection: int,
        seed: int,
    ) -> SimCLRNetwork:
        """A network with initial weights that depend on the seed alone, whatever else the process has drawn."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if architecture == "small-conv":
                encoder: nn.Module = _small_conv(channels, options)
            else:
                # Here: timm brings torchvision and half of torch's compiler, which a small network would wait for.
                from feature_store.backbones.timm_backbone import create_timm

                encoder = create_timm(architecture, {"in_chans": channels, **options}, pretrained=False)
            with torch.inference_mode():
                representation = encoder.eval()(torch.zeros(1, channels, side, side)).shape[1]
            network = cls(encoder, representation=int(representation), hidden=hidden, projection=projection)
        return network.to(memory_format=torch.channels_last)

    def project(self, images: Tensor) -> Tensor:
        """What the loss sees, shape (n, projection)."""
        projected: Tensor = self.head(self.encoder(images))
        return projected


def _small_conv(channels: int, options: dict[str, Any]) -> SmallConv:
    try:
        return SmallConv(channels=channels, **options)
    except TypeError as error:
        raise InvalidSetting(f"small-conv takes only the options widths and grid: {error}") from None


def simclr_backbone(
    checkpoint: Checkpoint, *, device: str, half: bool | None, batch_size: int | None
) -> NetworkBackbone:
    """The backbone a checkpoint holds; what it gives out (representation or projection) is written in it.

    Raises:
        BadData: the pretraining never finished, or the tensors do not fit the architecture named.
    """
    if not checkpoint.finished:
        raise BadData(
            f"this checkpoint stopped after {checkpoint.epochs_done} epochs; "
            "run the same pretraining again to finish it"
        )
    described = checkpoint.described
    transform = Transform.model_validate(described["transform"])
    network = SimCLRNetwork.build(
        described["architecture"],
        dict(described["options"]),
        channels=transform.channels,
        side=transform.crop,
        hidden=described["hidden"],
        projection=described["projection"],
        seed=0,
    )
    try:
        network.load_state_dict(checkpoint.network)
    except RuntimeError as error:
        raise BadData(f"the checkpoint's tensors do not fit the architecture it names: {error}") from None
    module: nn.Module = network.encoder
    dimension = network.representation
    if described["feature"] == "projection":
        module, dimension = nn.Sequential(network.encoder, network.head), int(described["projection"])
    libraries = [torch]
    if described["architecture"] != "small-conv":
        import timm

        libraries.insert(0, timm)
    spec = {
        "kind": "simclr",
        **described,
        "weights_sha256": hash_weights(module.state_dict()),
        "libraries": major_versions(*libraries),
    }
    return NetworkBackbone(
        module, dimension=dimension, transform=transform, spec=spec, device=device, half=half, batch_size=batch_size
    )


class SmallConv(nn.Module):
    """A small network for small images: enough for digits, seconds to train on a CPU.

    Stages of 3x3 convolutions with batch norm and ReLU, halved between stages, averaged to a small grid.

    The first stage, at full size, has one convolution; each later one has two, the first of which halves the side.

    The final grid (rather than one average) keeps where a stroke is, which tells a 6 from a 9.

    Args:
        channels: of the input image, 1 or 3.
        widths: output channels per stage.
        grid: side of the final grid; the feature has widths[-1] * grid**2 numbers.

    Attributes:
        num_features: dimension of the feature.
    """

    def __init__(self, *, channels: int = 3, widths: Sequence[int] = (32, 64, 128), grid: int = 2) -> None:
        super().__init__()
        if not widths or min(widths) < 1 or grid < 1 or channels not in (1, 3):
            raise InvalidSetting(
                "small-conv needs 1 or 3 channels, at least one positive width and a grid of at least 1; "
                f"found channels {channels}, widths {list(widths)}, grid {grid}"
            )
        layers: list[nn.Module] = []
        before = channels
        for stage, width in enumerate(widths):
            layers += _convolution(before, width, stride=1 if stage == 0 else 2)
            if stage:
                layers += _convolution(width, width, stride=1)
            before = width
        self.stages = nn.Sequential(*layers)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(grid), nn.Flatten())
        self.num_features = before * grid * grid

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape (n, num_features), of images of shape (n, channels, height, width)."""
        features: Tensor = self.pool(self.stages(images))
        return features


def _convolution(before: int, after: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


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
