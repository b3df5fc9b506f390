"""Encoder and projection head of SimCLR, and the backbone made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from feature_store.backbones.checkpoint import Checkpoint
from feature_store.backbones.network import NetworkBackbone, hash_weights, major_versions
from feature_store.backbones.small_conv import SmallConv
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
