"""A torch network as a backbone: inference mode, fixed batch shape, half precision only on a GPU."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feature_store.backbones.backbone import ImageLike, fingerprint_of, prepare_image, stack_prepared
from feature_store.backbones.spec import Transform
from labeler.errors import InvalidSetting

CPU_BATCH = 32
GPU_BATCH = 256


class NetworkBackbone:
    """A network that maps (n, channels, crop, crop) to (n, dimension), frozen.

    Every forward pass has the same number of images (the last is padded with black ones), because libraries choose
    their algorithms by shape: with one shape a record's feature does not depend on how many others came with it.

    Args:
        module: the network; it is moved to the device and put in inference mode.
        dimension: numbers in a feature.
        transform: preprocessing.
        spec: description for manifests and the fingerprint.
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".
        half: float16 arithmetic; by default on a GPU only, and refused on a CPU.
        batch_size: images per forward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dimension: int,
        transform: Transform,
        spec: Mapping[str, Any],
        device: str = "auto",
        half: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._device = resolve_device(device)
        on_gpu = self._device.type == "cuda"
        if half and not on_gpu:
            raise InvalidSetting("half precision needs a GPU; leave half out, or choose device cuda")
        self._half = on_gpu if half is None else half
        self._batch_size = batch_size or (GPU_BATCH if on_gpu else CPU_BATCH)
        self._dtype = torch.float16 if self._half else torch.float32
        module = module.eval().requires_grad_(False)
        self._module = module.to(self._device, self._dtype).to(memory_format=torch.channels_last)
        self._transform = transform
        self._mean = torch.tensor(transform.mean, device=self._device).view(1, -1, 1, 1)
        self._std = torch.tensor(transform.std, device=self._device).view(1, -1, 1, 1)
        self.dimension = dimension
        self.spec: dict[str, Any] = {**spec, "precision": "float16" if self._half else "float32"}
        self.fingerprint = fingerprint_of(self.spec)

    def prepare(self, image: ImageLike) -> NDArray[np.uint8]:
        return prepare_image(image, self._transform)

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        features = np.empty((len(prepared), self.dimension), dtype=np.float32)
        for start in range(0, len(prepared), self._batch_size):
            block = prepared[start : start + self._batch_size]
            padded = np.zeros((self._batch_size, *block.shape[1:]), dtype=np.uint8)
            padded[: len(block)] = block
            features[start : start + len(block)] = self._forward(padded)[: len(block)]
        return features

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        return self.embed_prepared(stack_prepared(images, self._transform))

    def tensors(self, images: Sequence[ImageLike]) -> Tensor:
        """What the network takes for these images, float32 of shape (n, channels, crop, crop)."""
        pixels = to_unit_range(torch.from_numpy(stack_prepared(images, self._transform)).to(self._device))
        return (pixels - self._mean) / self._std

    def training_copy(self) -> nn.Module:
        """A copy of the network with weights that can be trained; this backbone itself stays frozen."""
        return copy.deepcopy(self._module).float().requires_grad_(True)

    @torch.inference_mode()
    def _forward(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        images = to_unit_range(torch.from_numpy(pixels).to(self._device))
        normalised = ((images - self._mean) / self._std).to(self._dtype).contiguous(memory_format=torch.channels_last)
        features: NDArray[np.float32] = self._module(normalised).float().cpu().numpy()
        return features


def to_unit_range(pixels: Tensor) -> Tensor:
    """uint8 (n, height, width, channels) to float32 (n, channels, height, width) in [0, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 255


def resolve_device(device: str) -> torch.device:
    """The torch device a name means; refuses a GPU that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InvalidSetting(f"device must be auto, cpu, cuda or cuda:N, found {device!r}") from None
    if resolved.type not in ("cpu", "cuda"):
        raise InvalidSetting(f"device must be auto, cpu, cuda or cuda:N, found {device!r}")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting(f"device {device!r} was asked for, but torch sees no GPU here; use auto or cpu")
    return resolved


def hash_weights(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, in the order of their names."""
    sha256 = hashlib.sha256(b"labeler-weights/1\n")
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def major_versions(*modules: Any) -> dict[str, int]:
    """Major version of each library, whose next one may compute something else from the same weights."""
    return {module.__name__: int(module.__version__.split(".")[0]) for module in modules}
