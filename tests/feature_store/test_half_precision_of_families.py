"""Networks of timm's families compute in half precision: shapes and types of a whole pass, without a GPU or a number.

A network that makes a float32 tensor on its way, a table of positions for instance, fails on a GPU at its first
image. On the meta device every operation checks types as on a GPU, and computes nothing.
"""

from __future__ import annotations

import pytest
import timm.data
import torch

from feature_store.backbones.network import create_timm

FAMILIES = (
    "resnet18",
    "regnety_008",
    "densenet121",
    "vgg11_bn",
    "inception_v3",
    "repvgg_a0",
    "nfnet_f0",
    "efficientnet_lite0",
    "mobilenetv3_large_100",
    "ghostnet_100",
    "convnext_tiny",
    "fastvit_t8",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "maxvit_tiny_rw_224",
    "mixer_s16_224",
    "levit_128",
    "hiera_tiny_224",
    "xcit_nano_12_p16_224",
    "cait_xxs24_224",
    "poolformer_s12",
    "edgenext_small",
    "mobilevit_s",
)


def test_there_are_26_families() -> None:
    assert len({timm.models.model_entrypoint(name).__module__ for name in FAMILIES}) == len(FAMILIES) == 26


QUICK = ("resnet18", "efficientnet_lite0", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
@torch.inference_mode()
def test_a_pass_in_half_precision_ends_in_half_precision_features(name: str) -> None:
    with torch.device("meta"):
        network = create_timm(name, {}, pretrained=False).eval()
    size = timm.data.resolve_model_data_config(network)["input_size"]
    network = network.to(torch.float16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    features = network(torch.empty((2, *size), dtype=torch.float16, device="meta"))
    assert features.dtype == torch.float16
    assert features.shape[0] == 2
    assert features.ndim == 2
