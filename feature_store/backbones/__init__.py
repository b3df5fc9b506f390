"""Backbones: frozen functions from an image to a feature, each with a fingerprint of everything that defines it.

Importing this package loads no deep-learning library; `load_backbone` loads the one it needs.
"""

from __future__ import annotations

from pathlib import Path

from feature_store.backbones.backbone import Backbone, ImageLike, load_pixels
from feature_store.backbones.spec import BackboneSpec, Decoder, Transform, check_device, parse_spec, read_spec
from labeler.errors import BadData

__all__ = ["Backbone", "BackboneSpec", "Decoder", "ImageLike", "Transform", "load_backbone", "parse_spec", "read_spec"]


def load_backbone(
    source: BackboneSpec | Path | str,
    *,
    architecture: str | None = None,
    device: str = "auto",
    half: bool | None = None,
    batch_size: int | None = None,
) -> Backbone:
    """Load a backbone.

    Args:
        source: a spec, a backbone file (TOML), a SimCLR checkpoint, or a short name such as "efficientnet-lite0",
            "pixels" or "timm:mobilenetv3_large_100" (see feature_store.backbones.spec).
        architecture: of the weights, where `source` is a safetensors file of them.
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".
        half: float16 arithmetic; by default on a GPU only, and refused on a CPU.
        batch_size: images per forward pass; by default 32 on a CPU and 256 on a GPU.

    Raises:
        InvalidSetting: the spec, the device or the batch size is wrong.
        BadData: a file is missing, damaged or of another kind.
        TryAgain: published weights could not be fetched.
    """
    # Heavy libraries are imported here and not above, so that the coordinator never loads them.
    check_device(device)
    spec = source if isinstance(source, BackboneSpec) else read_spec(source, architecture=architecture)
    if spec.weights is not None and not spec.weights.is_file():  # before a second is spent on importing torch
        what = "checkpoint" if spec.kind == "simclr" else "weights"
        raise BadData(f"no {what} file {spec.weights.name!r} in the folder named; check the path")
    if spec.kind == "pixels":
        return load_pixels(spec)
    if spec.kind == "simclr" and spec.weights is not None:
        from feature_store.backbones.simclr import read_checkpoint, simclr_backbone

        checkpoint = read_checkpoint(spec.weights)
        return simclr_backbone(checkpoint, device=device, half=half, batch_size=batch_size)
    from feature_store.backbones.network import load_timm

    return load_timm(spec, device=device, half=half, batch_size=batch_size)
