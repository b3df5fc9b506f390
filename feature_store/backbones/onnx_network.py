"""A network on a processor, run by ONNX Runtime: the same features as torch in a third to nine tenths of the time.

`convert` exports a loaded network, compares it with torch on a probe, and keeps it in the cache folder. The next
`read_converted` needs neither torch nor timm, which take seconds to load. A network whose conversion fails or differs
stays in torch; that answer is kept too.

**A feature depends on its image alone.** ONNX Runtime gets one image at a time and computes on the calling thread.
Several threads of ours run images side by side, so neither the batch nor the number of threads can change a bit.

**Nothing is reported.** By default ONNX Runtime tells its maker how it is used, and writes an identifier of the
machine. This module switches that off before it loads the library: no sender, no event, no identifier. So it is the one
door to the library.

**The fingerprint** is that of weights and preparation, as in torch. Features differ by rounding: the bound on the probe
is `TOLERANCE`, and one step of a stored feature is 1/2048. The manifest names the runtime next to the precision.

**The cache** is `$XDG_CACHE_HOME/private-labeler`, or `~/.cache/private-labeler`; it may be deleted at any time. A file
is one line of JSON, then the network, written at once and readable by its owner only. Its name is a digest of the
backbone's description, of its weights file and of the versions of all libraries. A file that another user owns or can
write is never read, and a file that does not match its own digest is replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.backbones.backbone import Backbone, ImageLike, fingerprint_of, stack_prepared
from feature_store.backbones.spec import PACKAGED, BackboneSpec, Transform, package_path
from labeler.system.files import open_regular, replace_file
from labeler.system.process_pool import all_cores

if TYPE_CHECKING:
    from torch import nn

    from feature_store.backbones.network import NetworkBackbone

TOLERANCE: Final = 5e-6
"""The most by which a coordinate of a normalized feature may differ from torch's: 1/98 of a step of a stored one.

Six architectures differ by 0.4e-7 to 8e-7, and torch differs as much from double precision. A wrong padding or epsilon
differs by thousands of times more.
"""

RUNTIME: Final = "onnxruntime"

_FORMAT: Final = 1
_LIBRARIES: Final = ("onnxruntime", "timm", "torch")

log = logging.getLogger("labeler.backbones")


class OnnxBackbone:
    """A converted network; see the module.

    Args:
        model: bytes of an ONNX file with one input, uint8 of shape (1, crop, crop, channels), and one output.
        dimension: numbers in a feature.
        spec: description for manifests and the fingerprint.
        batch_size: images that a caller should pass at once; each is computed alone.
    """

    def __init__(self, model: bytes, *, dimension: int, spec: dict[str, Any], batch_size: int | None = None) -> None:
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when the library is loaded; see the module
        import onnxruntime

        onnxruntime.disable_telemetry_events()  # for a process in which others have loaded it before
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.use_deterministic_compute = True
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self.batch_size = batch_size or 1
        self.dimension = dimension
        self.transform = Transform.model_validate(spec["transform"])
        self.spec = {**spec, "runtime": RUNTIME}
        self.fingerprint = fingerprint_of(self.spec)

    def embed_prepared(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        features = np.empty((len(prepared), self.dimension), dtype=np.float32)

        def embed_one(place: int) -> None:
            features[place] = self._session.run(None, {self._input: prepared[place : place + 1]})[0][0]

        threads = min(_threads(), len(prepared))
        if threads < 2:
            for place in range(len(prepared)):
                embed_one(place)
            return features
        with ThreadPoolExecutor(threads, thread_name_prefix="forward") as pool:
            for _ in pool.map(embed_one, range(len(prepared))):
                pass
        return features

    def embed(self, images: Sequence[ImageLike]) -> NDArray[np.float32]:
        return self.embed_prepared(stack_prepared(images, self.transform))


def _threads() -> int:
    """Return the cores to compute on: all, or as many as OMP_NUM_THREADS says, which torch follows too."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(all_cores(), int(limit)) if limit.isdecimal() and int(limit) else all_cores()


def cache_path(spec: BackboneSpec) -> Path | None:
    """Return the file of the cache for a backbone and the installed libraries; None if its weights are no file.

    Published weights are only known once timm has loaded them, and the cache is there to do without.

    Raises:
        InvalidSetting: the package with the weights is not installed.
    """
    path = package_path(PACKAGED[spec.architecture]) if spec.kind == "packaged" else spec.weights
    if path is None:
        return None
    try:
        with open_regular(path) as file:
            weights = hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None  # the loader says what is wrong
    described = {
        "format": _FORMAT,
        "spec": spec.model_dump(mode="json", exclude={"weights"}),
        "weights": [path.name, weights],
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "private-labeler" / f"{key}.onnx"


@dataclass(frozen=True)
class Kept:
    """The content of a file of the cache.

    Attributes:
        model: the ONNX file; empty if this network stays in torch.
        dimension, spec: of its backbone.
    """

    model: bytes
    dimension: int
    spec: dict[str, Any]


def read_converted(path: Path) -> Kept | None:
    """Return what a file of the cache holds; None if there is none that can be trusted."""
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                log.warning(
                    "a converted network is not read: another user of this machine could have written it",
                    extra={"file": path.name},
                )
                return None
            head, _, model = file.read().partition(b"\n")
        header = json.loads(head)
        if (header["key"], header["sha256"]) != (path.stem, hashlib.sha256(model).hexdigest()):
            return None
        return Kept(model, int(header["dimension"]), dict(header["spec"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged, or not ours: it is replaced


def _write(path: Path, kept: Kept) -> None:
    header = {
        "key": path.stem,
        "sha256": hashlib.sha256(kept.model).hexdigest(),
        "dimension": kept.dimension,
        "spec": kept.spec,
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(header).encode() + b"\n" + kept.model, mode=0o600)
    except OSError as error:
        log.warning(
            "a converted network could not be kept, so every start converts it again; set XDG_CACHE_HOME to a folder "
            "that can be written",
            extra={"reason": error.strerror},
        )


def convert(network: NetworkBackbone, path: Path | None, *, batch_size: int | None = None) -> Backbone:
    """Return a network as ONNX Runtime runs it; the network itself if its conversion fails or differs from torch.

    Args:
        network: on a processor.
        path: where to keep the result; nowhere if None.
        batch_size: as for `OnnxBackbone`.
    """
    import torch

    whole, probe = network.from_bytes(), _probe(network.transform)
    architecture = network.spec.get("architecture")
    made: OnnxBackbone | None = None
    model = b""
    try:
        model = _export(whole, probe[:1])
        made = OnnxBackbone(model, dimension=network.dimension, spec=network.spec, batch_size=batch_size)
        with torch.inference_mode():
            difference = _difference(made.embed_prepared(probe), whole(torch.from_numpy(probe)).numpy())
        if not difference <= TOLERANCE:
            log.warning(
                "a converted network differs from torch, which runs it instead",
                extra={"architecture": architecture, "difference": difference},
            )
            model, made = b"", None
    except Exception as error:  # the exporter raises almost anything at an operation that it does not know
        log.info(
            "a network could not be converted, and torch runs it",
            extra={"architecture": architecture, "kind": type(error).__name__},
        )
        model, made = b"", None
    if path is not None:
        _write(path, Kept(model, network.dimension, network.spec))
    return network if made is None else made


def _export(whole: nn.Module, pixels: NDArray[np.uint8]) -> bytes:
    """Return the ONNX file of a network that takes bytes."""
    import torch

    buffer = BytesIO()
    with warnings.catch_warnings():
        # The exporter says that it is the older one. The newer one needs another package and ten times as long.
        warnings.simplefilter("ignore")
        torch.onnx.export(whole, (torch.from_numpy(pixels),), buffer, dynamo=False)  # type: ignore[arg-type]  # a buffer
    return buffer.getvalue()


def _probe(transform: Transform) -> NDArray[np.uint8]:
    """Return three images: noise, noise in patches, and a slope from dark to bright."""
    side, shape = transform.crop, (transform.crop, transform.crop, transform.channels)
    rng = np.random.default_rng(35)
    noise = rng.integers(0, 256, shape, dtype=np.uint8)
    patches = np.arange(side) // 8
    slope = np.linspace(0, 255, side).astype(np.uint8)[:, None, None]
    return np.stack([noise, noise[patches][:, patches], np.broadcast_to(slope, shape)])


def _difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the largest difference of normalized features; not a number if one is none."""
    least = np.finfo(np.float32).tiny
    first, second = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), least) for rows in (one, other))
    return float(np.abs(first - second).max())
