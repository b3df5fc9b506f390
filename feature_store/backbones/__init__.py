"""Backbones: frozen functions from an image to a feature, each with a fingerprint of everything that defines it.

Importing this package loads no deep-learning library; `load_backbone` loads the one it needs: torch on a GPU, ONNX
Runtime on a processor where it gives the features of torch (`onnx_network`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from feature_store.backbones.backbone import Backbone, ImageLike, load_pixels
from feature_store.backbones.spec import (
    BackboneSpec,
    Decoder,
    Transform,
    check_device,
    has_gpu_driver,
    parse_spec,
    read_spec,
)
from labeler.errors import BadData, InvalidSetting

if TYPE_CHECKING:
    from feature_store.backbones.network import NetworkBackbone

__all__ = [
    "Backbone",
    "BackboneSpec",
    "Decoder",
    "ImageLike",
    "Transform",
    "load_backbone",
    "load_network",
    "parse_spec",
    "read_spec",
]


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
        batch_size: images that are embedded at once; by default 256 on a GPU. torch on a CPU takes 32 by default.

    Raises:
        InvalidSetting: the spec, the device or the batch size is wrong.
        BadData: a file is missing, damaged or of another kind.
        TryAgain: published weights could not be fetched.
    """
    # Heavy libraries are imported below, so that the coordinator never loads them.
    check_device(device)
    spec = _spec_of(source, architecture)
    if batch_size is not None and batch_size < 1:
        raise InvalidSetting(f"batch_size must be at least 1, found {batch_size}")
    if spec.kind == "pixels":
        return load_pixels(spec)
    from feature_store.backbones.onnx_network import OnnxBackbone, cache_path, convert, read_converted

    path = None if device.startswith("cuda") else cache_path(spec)
    kept = None if path is None else read_converted(path)
    converted = None
    if kept is not None and kept.model:
        converted = partial(OnnxBackbone, kept.model, dimension=kept.dimension, spec=kept.spec, batch_size=batch_size)
        if not half and (device == "cpu" or not has_gpu_driver()):
            return converted()
    network = _load_network(spec, device=device, half=half, batch_size=batch_size)
    if network.is_on_gpu:
        return network
    if kept is None:
        return convert(network, path, batch_size=batch_size)
    return network if converted is None else converted()


def load_network(source: BackboneSpec | Path | str, *, device: str = "auto") -> NetworkBackbone:
    """Load a backbone as a network of torch, which can be trained further.

    Raises:
        InvalidSetting: it is no network; and as `load_backbone`.
    """
    check_device(device)
    spec = _spec_of(source, None)
    if spec.kind == "pixels":
        raise InvalidSetting(f"backbone {str(source)!r} is not a network, so there is nothing to fine-tune")
    return _load_network(spec, device=device, half=None, batch_size=None)


def _spec_of(source: BackboneSpec | Path | str, architecture: str | None) -> BackboneSpec:
    spec = source if isinstance(source, BackboneSpec) else read_spec(source, architecture=architecture)
    if spec.weights is not None and not spec.weights.is_file():  # before a second is spent on importing torch
        what = "checkpoint" if spec.kind == "simclr" else "weights"
        raise BadData(f"no {what} file {spec.weights.name!r} in the folder named; check the path")
    return spec


def _load_network(spec: BackboneSpec, *, device: str, half: bool | None, batch_size: int | None) -> NetworkBackbone:
    if spec.kind == "simclr" and spec.weights is not None:
        from feature_store.backbones.simclr import read_checkpoint, simclr_backbone

        checkpoint = read_checkpoint(spec.weights)
        return simclr_backbone(checkpoint, device=device, half=half, batch_size=batch_size)
    from feature_store.backbones.network import load_timm

    return load_timm(spec, device=device, half=half, batch_size=batch_size)
