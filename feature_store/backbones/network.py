"""A torch network as a backbone: inference mode, fixed batch shape, half precision only on a GPU.

Half precision ends at 65,504. An image whose feature leaves that range is computed again in float32, so no record is
lost to a network whose numbers are large. That decision depends on each image alone.

Networks of the timm library have weights that came as a package, from a local safetensors file, or from a hub. timm
takes seconds to import, so it is imported where it is used.

**A hub** is needed for a file that is not in the cache yet. Then we first try to connect to it, for a few seconds; the
library itself would try for half a minute. Behind a proxy we skip this test, because only the library knows how to
get through.

**Packages** carry ImageNet weights (`feature_store.backbones.spec`), so that a first shard needs no other download.
The files of EfficientNet-Lite0 and -Lite2 (Apache-2.0, converted from Google's TensorFlow checkpoints) name their
tensors differently from timm. But the tensors lie in the order of timm's `tf_efficientnet_lite0` and `_lite2`. So they
are loaded in that order, and every shape is compared. The file is checked against a pinned digest before it is read.
No code in it runs, because torch reads tensors only.
"""

from __future__ import annotations

import copy
import hashlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from feature_store.backbones.backbone import ImageLike, fingerprint_of, stack_prepared
from feature_store.backbones.spec import (
    DEFAULT_DECODER,
    PACKAGED,
    BackboneSpec,
    Package,
    Transform,
    check_device,
    package_path,
)
from feature_store.rows import usable_rows
from labeler.errors import BadData, InvalidSetting, TryAgain
from labeler.settings import nearest
from labeler.system.files import open_regular

CPU_BATCH = 32
GPU_BATCH = 256


class NetworkBackbone:
    """A network that maps (n, channels, crop, crop) to (n, dimension), frozen.

    Every forward pass has the same number of images; the last is padded with black ones. Libraries choose their
    algorithms by shape, so with one shape a record's feature does not depend on how many others came with it.

    Args:
        module: the network; it is moved to the device and put in inference mode.
        dimension: numbers in a feature.
        transform: preprocessing.
        spec: description for manifests and the fingerprint.
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".
        half: float16 arithmetic; by default on a GPU only, and refused on a CPU.
        batch_size: images per forward pass; a different size may change features in their last bits.
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
        self.is_on_gpu = on_gpu = self._device.type == "cuda"
        if half and not on_gpu:
            raise InvalidSetting("half precision needs a GPU; leave half out, or choose device cuda")
        self._half = on_gpu if half is None else half
        self.batch_size = batch_size or (GPU_BATCH if on_gpu else CPU_BATCH)
        # In half precision the float32 weights stay on the host: rounded to float16, some of them may be infinite.
        self._whole = module.eval().requires_grad_(False)
        self._module = self._on_device(copy.deepcopy(self._whole).half() if self._half else self._whole)
        self._single: nn.Module | None = None if self._half else self._module
        self.transform = transform
        self._mean = torch.tensor(transform.mean, device=self._device).view(1, -1, 1, 1)
        self._std = torch.tensor(transform.std, device=self._device).view(1, -1, 1, 1)
        self.dimension = dimension
        self.spec: dict[str, Any] = {**spec, "precision": "float16" if self._half else "float32"}
        self.fingerprint = fingerprint_of(self.spec)

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        blocks = [prepared[start : start + self.batch_size] for start in range(0, len(prepared), self.batch_size)]
        return np.concatenate([np.empty((0, self.dimension), np.float32), *map(self._pass, blocks)])

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        return self.embed_prepared(stack_prepared(images, self.transform))

    def tensors(self, images: Iterable[ImageLike]) -> PreparedImages:
        """Return these images preprocessed for the network. Each original image is released once it is prepared."""
        return PreparedImages(stack_prepared(images, self.transform), self._mean, self._std)

    def training_copy(self) -> nn.Module:
        """Return a copy of the network whose weights can be trained; this backbone itself stays frozen."""
        return self._on_device(copy.deepcopy(self._whole)).requires_grad_(True)

    def from_bytes(self) -> nn.Module:
        """Return the network that takes prepared images, uint8 of shape (n, height, width, channels)."""
        return _FromBytes(self._whole, self._mean, self._std).eval()

    def _on_device(self, module: nn.Module) -> nn.Module:
        return module.to(self._device).to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def _pass(self, block: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Run one forward pass of at most `batch_size` images, padded to the one fixed shape.

        Rows that overflow in half precision are computed again in float32.
        """
        padded = torch.zeros(
            (self.batch_size, *block.shape[1:]), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        padded.numpy()[: len(block)] = block
        features = self._forward(padded, self._module)[: len(block)]
        lost = ~usable_rows(features)
        if self._half and lost.any():
            if self._single is None:
                self._single = self._on_device(copy.deepcopy(self._whole))
            features[lost] = self._forward(padded, self._single)[: len(block)][lost]
        return features

    def _forward(self, pixels: Tensor, module: nn.Module) -> NDArray[np.float32]:
        images = (to_unit_range(pixels.to(self._device, non_blocking=True)) - self._mean) / self._std
        precision = torch.float32 if module is self._single else torch.float16
        features: Tensor = module(images.to(precision).contiguous(memory_format=torch.channels_last))
        computed: NDArray[np.float32] = features.float().cpu().numpy()
        return computed


class _FromBytes(nn.Module):
    def __init__(self, module: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.module, self.mean, self.std = module, mean, std

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.module((to_unit_range(pixels) - self.mean) / self.std)
        return features


class PreparedImages:
    """Images as bytes on the host; indexing converts some of them to the network's input on its device.

    As float32 on a device the whole set would be four times as large: a million photos are 602 GB.

    Args:
        pixels: uint8, shape (n, height, width, channels).
        mean, std: constants of the network's preprocessing, shape (1, channels, 1, 1), on its device.
    """

    def __init__(self, pixels: NDArray[np.uint8], mean: Tensor, std: Tensor) -> None:
        self._pixels = torch.from_numpy(pixels)
        self._mean, self._std = mean, std

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, where: slice | Tensor) -> Tensor:
        """Return the chosen images as float32, shape (m, channels, height, width), on the network's device."""
        return (to_unit_range(self._pixels[where].to(self._mean.device)) - self._mean) / self._std


def to_unit_range(pixels: Tensor) -> Tensor:
    """Convert uint8 (n, height, width, channels) to float32 (n, channels, height, width) in [0, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 255


def resolve_device(device: str) -> torch.device:
    """Return the torch device of a name; refuse a GPU that this machine does not have."""
    check_device(device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting(f"device {device!r} was asked for, but torch sees no GPU here; use auto or cpu")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise InvalidSetting(f"device {device!r} was asked for, but the last GPU that torch sees here is cuda:{last}")
    return resolved


def hash_weights(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of all tensors, in the order of their names."""
    sha256 = hashlib.sha256(b"labeler-weights/1\n")
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def major_versions(*modules: Any) -> dict[str, int]:
    """Return the major version of each library; the next one may compute something else from equal weights."""
    return {module.__name__: int(module.__version__.split(".")[0]) for module in modules}


def load_timm(spec: BackboneSpec, *, device: str, half: bool | None, batch_size: int | None) -> NetworkBackbone:
    """Build the network of a spec of kind timm without its classifier, and load its weights.

    The options and the transform are part of the fingerprint, because the same weights under other options load
    without complaint and compute something else.

    Raises:
        InvalidSetting: timm knows no such architecture or option, or the file's tensors do not fit it.
        BadData: the weights file is missing, or is not a safetensors file.
        TryAgain: the published weights could not be fetched.
    """
    import timm

    packaged = PACKAGED[spec.architecture] if spec.kind == "packaged" else None
    architecture = packaged.architecture if packaged else spec.architecture
    is_published = packaged is None and spec.weights is None
    if is_published:
        check_hub_reachable(architecture)
    module = create_timm(architecture, dict(spec.options), pretrained=is_published)
    transform = spec.transform if isinstance(spec.transform, Transform) else _published_transform(module, architecture)
    transform = transform.model_copy(update={"decoder": spec.decoder or DEFAULT_DECODER})
    if packaged is not None:
        load_packaged(module, packaged)
    elif spec.weights is not None:
        _load_weights(module, spec.weights, architecture)
    described = {
        "kind": "timm",
        "architecture": architecture,
        "weights": packaged.file if packaged else spec.weights.name if spec.weights else "published",
        "weights_sha256": hash_weights(module.state_dict()),
        "options": dict(spec.options),
        "transform": transform.model_dump(mode="json"),
        "libraries": major_versions(timm, torch),
    }
    return NetworkBackbone(
        module,
        dimension=_dimension(module, transform),
        transform=transform,
        spec=described,
        device=device,
        half=half,
        batch_size=batch_size,
    )


def create_timm(architecture: str, options: dict[str, Any], *, pretrained: bool) -> nn.Module:
    """Call timm.create_model without a classifier; turn its errors into ones that say what to do."""
    import timm

    if not timm.is_model(architecture.split(".")[0]):
        found = nearest(architecture, (*PACKAGED, "pixels")) or nearest(architecture, timm.list_models())
        near = f"did you mean {found!r}? Or " if found else ""
        raise InvalidSetting(
            f"timm {timm.__version__} knows no architecture {architecture!r}; {near}"
            "list them with: python -c 'import timm; print(timm.list_models())'"
        )
    try:
        module: nn.Module = timm.create_model(architecture, pretrained=pretrained, num_classes=0, **options)
    except (TypeError, AssertionError, ValueError, KeyError) as error:
        raise InvalidSetting(f"architecture {architecture!r} refuses options {sorted(options)}: {error}") from None
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise InvalidSetting(f"architecture {architecture!r} cannot be built: {error}") from None
        raise TryAgain(
            f"the published weights of {architecture!r} could not be fetched ({type(error).__name__}); check the "
            "connection to the hub, or download the safetensors file elsewhere and name it as `weights` in a "
            "backbone file"
        ) from error
    return module


def _load_weights(module: nn.Module, path: Path, architecture: str) -> None:
    try:
        with open_regular(path):
            state = load_file(path)
    except FileNotFoundError:
        raise BadData(f"no weights file {path.name!r} in the folder named; check the path") from None
    except (SafetensorError, OSError) as error:
        raise BadData(f"weights file {path.name!r} is no safetensors file, or damaged: {error}") from None
    expected = module.state_dict()
    # A file may still hold its classifier: those tensors are ignored.
    unused = set(state) - set(expected)
    missing = set(expected) - set(state) - {name for name in expected if name.endswith("num_batches_tracked")}
    if missing or any(not name.startswith(("classifier.", "head.", "fc.")) for name in unused):
        raise InvalidSetting(
            f"weights file {path.name!r} does not fit {architecture!r}: {len(missing)} tensors are missing and "
            f"{len(unused)} are unknown; check architecture and options"
        )
    try:
        module.load_state_dict({name: tensor for name, tensor in state.items() if name in expected}, strict=False)
    except RuntimeError as error:
        raise InvalidSetting(f"weights file {path.name!r} does not fit {architecture!r}: {error}") from None


def _published_transform(module: nn.Module, architecture: str) -> Transform:
    import timm.data

    config = timm.data.resolve_model_data_config(module)  # type: ignore[attr-defined, no-untyped-call]  # timm is half typed
    crop = int(config["input_size"][-1])
    if config["interpolation"] not in ("nearest", "bilinear", "bicubic", "lanczos"):
        raise InvalidSetting(
            f"{architecture!r} was published with interpolation {config['interpolation']!r}, which is not offered; "
            "write a [transform] table in a backbone file"
        )
    return Transform(
        resize=max(crop, int(crop / config["crop_pct"])),
        crop=crop,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
    )


@torch.inference_mode()
def _dimension(module: nn.Module, transform: Transform) -> int:
    output = module.eval()(torch.zeros(1, transform.channels, transform.crop, transform.crop))
    if output.ndim != 2:
        raise InvalidSetting(f"the network gives an output of shape {tuple(output.shape)}; (n, dimension) is needed")
    return int(output.shape[1])


CONNECT_S = 3.0
_FILES = ("model.safetensors", "pytorch_model.bin")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def check_hub_reachable(architecture: str) -> None:
    """Refuse at once if published weights are not in the cache and the hub cannot be reached.

    Raises:
        TryAgain: the hub does not answer.
    """
    import timm
    from huggingface_hub import constants

    config = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
    repository = getattr(config, "hf_hub_id", None)
    if not repository or _is_cached(repository) or any(os.environ.get(name) for name in _PROXIES):
        return
    where = urlsplit(constants.ENDPOINT)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError
        with socket.create_connection((where.hostname or "", where.port or 443), timeout=CONNECT_S):
            return
    except OSError:
        raise TryAgain(
            f"the published weights of {architecture!r} are not kept on this machine, and the hub cannot be reached. "
            "efficientnet-lite0 needs no download; or download a safetensors file elsewhere and name it with "
            f"--backbone FILE.safetensors --architecture {architecture}"
        ) from None


def _is_cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(repository, name), str) for name in _FILES)


def load_packaged(module: nn.Module, package: Package) -> None:
    """Load packaged weights into a timm network without its classifier.

    Raises:
        InvalidSetting: the package is not installed.
        BadData: its file is missing, or its digest is not the pinned one.
    """
    path = package_path(package)
    try:
        data = path.read_bytes()
    except OSError:
        raise BadData(f"package {package.module!r} lacks its file {package.file!r}; install it again") from None
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise BadData(
            f"file {package.file!r} of package {package.module!r} is not the one whose digest we know; install it again"
        )
    stored = list(torch.load(path, map_location="cpu", weights_only=True).values())
    names = list(module.state_dict())
    # The file ends with two tensors of the classifier, which is not used.
    state = dict(zip(names, stored, strict=False))
    wrong = [name for name, tensor in module.state_dict().items() if state[name].shape != tensor.shape]
    if wrong or len(stored) != len(names) + 2:
        raise BadData(f"the tensors of {package.file!r} do not lie in the order of {package.architecture!r}")
    module.load_state_dict(state)
