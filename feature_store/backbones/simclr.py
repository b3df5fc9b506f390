"""SimCLR pretraining on public images: a backbone for a user who has no suitable published one.

Two random views of every image pass an encoder and a projection head; the NT-Xent loss pulls the views together and
pushes other images apart (Chen et al. 2020). Only public images may be given here: a network trained on private ones
would carry them into every feature, and no guarantee of this project covers that.

Every geometric change of a view (crop, rotation, scale, shear, shift, flip, elastic bend) is one warp of the sampling
grid. So a batch costs one `grid_sample` however many changes are on; per-image transforms would cost more than the
network.

A checkpoint is one safetensors file with the weights, and all that using or continuing them needs.

More than 600 lines: views, network, training and checkpoint are one recipe, and half of it is settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save
from torch import Generator, Tensor, nn
from torch.nn import functional

from feature_store.backbones.backbone import ImageLike, stack_prepared
from feature_store.backbones.network import NetworkBackbone, hash_weights, major_versions, resolve_device, to_unit_range
from feature_store.backbones.spec import Option, Transform
from labeler.errors import BadData, InvalidSetting

Progress = Callable[[int, int, float], None]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]

_WARMUP_SHARE = 0.1


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]

_BLUR_TAPS = 5
_LUMA = (0.299, 0.587, 0.114)


class Augmentation(BaseModel):
    """The differences between two views of one image; an amount of 0 (probability 0) turns its change off.

    Attributes:
        crop_area: smallest share of the area a random crop keeps (1 keeps all); aspect ratios from 3/4 to 4/3.
        flip: probability of a mirror image. Leave it 0 for digits and letters: a mirrored 2 is no 2.
        rotation_degrees: rotation uniform in plus or minus this many degrees.
        zoom: scale factor uniform in [1 - zoom, 1 + zoom].
        shear: shear coefficient uniform in plus or minus this.
        shift: translation uniform in plus or minus this share of the side.
        elastic: standard deviation of a smooth random displacement, as a share of the side.
        elastic_cells: side of the coarse grid that displacement is drawn on.
        outside: what lies beyond the border: "zeros" (black) or "reflection".
        brightness: shift of all values, uniform in plus or minus this (values are in [0, 1]).
        contrast: factor about the image's mean, uniform in [1 - contrast, 1 + contrast].
        saturation: the same towards the gray image, for color images.
        grey: probability that a color image becomes gray.
        blur: probability of a Gaussian blur of one pixel.
        noise: largest standard deviation of added pixel noise; each image draws its own, uniform from 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The defaults are for photographs, close to the recipe of Chen et al. (2020), appendix A.
    crop_area: Annotated[float, Field(gt=0, le=1)] = 0.3
    flip: Share = 0.5
    rotation_degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    shear: Amount = 0.0
    shift: Share = 0.0
    elastic: Share = 0.0
    elastic_cells: Annotated[int, Field(ge=2, le=32)] = 4
    outside: Literal["zeros", "reflection"] = "reflection"
    brightness: Share = 0.3
    contrast: Annotated[float, Field(ge=0, lt=1)] = 0.4
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.4
    grey: Share = 0.2
    blur: Share = 0.3
    noise: Share = 0.0


DIGITS = Augmentation(
    crop_area=1.0,
    flip=0.0,
    rotation_degrees=15.0,
    zoom=0.15,
    shear=0.2,
    shift=0.1,
    elastic=0.03,
    outside="zeros",
    brightness=0.1,
    contrast=0.3,
    saturation=0.0,
    grey=0.0,
    blur=0.3,
    noise=0.1,
)
"""For handwritten digits and letters: nothing that turns one character into another."""


class SimCLRConfig(BaseModel):
    """One pretraining, apart from the images and the seed.

    Attributes:
        architecture: "small-conv" or any timm architecture (randomly initialised).
        options: of small-conv (widths, grid) or of timm.create_model.
        transform: preprocessing, which becomes part of the backbone; one mean per channel.
        augmentation: how two views of an image differ.
        hidden: width of the projection head's hidden layer.
        projection: numbers the projection head ends in.
        feature: what the backbone gives out: the encoder's "representation" (better on photographs, as in the
            paper) or the head's "projection" (better on digits, where the changes are exactly the nuisances).
        epochs: passes over the images.
        batch_size: images per step, each seen twice; at most the number of images.
        learning_rate: peak of AdamW's rate, after a tenth of linear warm-up and before a cosine to zero.
        weight_decay: of AdamW.
        temperature: of NT-Xent.
        checkpoint_every: epochs between checkpoints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Annotated[str, Field(min_length=1, max_length=200)] = "small-conv"
    options: dict[str, Option | list[Option]] = {}
    transform: Transform = Transform(resize=64, crop=64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    augmentation: Augmentation = Augmentation()
    hidden: Count = 256
    projection: Count = 64
    feature: Literal["representation", "projection"] = "representation"
    epochs: Count = 100
    batch_size: Annotated[int, Field(ge=2, le=65_536)] = 256
    learning_rate: Positive = 2e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    temperature: Positive = 0.5
    checkpoint_every: Count = 10


DIGITS_CONFIG = SimCLRConfig(
    options={"widths": [16, 32, 64], "grid": 2},
    transform=Transform(resize=16, crop=16, mean=(0.5,), std=(0.5,), interpolation="bicubic"),
    augmentation=DIGITS,
    feature="projection",
    epochs=50,
    temperature=0.4,
)
"""For about a thousand small handwritten digits."""


def pretrain(
    images: Sequence[ImageLike],
    *,
    config: SimCLRConfig,
    seed: int,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    device: str = "auto",
    threads: int | None = None,
) -> NetworkBackbone:
    """Pretrain a backbone on public images.

    Initial weights come from the seed, and each epoch's order and views from (seed, epoch). So a run that stops and
    goes on from its checkpoint ends with the weights of one that never stopped, on the same machine and thread count.
    Other libraries or processors round differently.

    Args:
        images: PUBLIC images, at least 8: Pillow images or uint8 arrays of any size.
        seed: 0 to 2^63 - 1.
        checkpoint: safetensors file, written every few epochs and at the end. One that exists is continued; a
            finished one is returned as it is; one of other images, settings or seed is refused.
        progress: called after every epoch with (epochs done, epochs in all, mean loss of the epoch).
        device: "auto", "cpu", "cuda" or "cuda:N".
        threads: CPU threads, by default as many as torch chooses. For small images 1 is nearly as fast, and several
            times faster where other processes keep the cores busy, since torch's threads wait for each other.

    Returns:
        The backbone; `load_backbone(checkpoint)` gives the same one later.

    Raises:
        InvalidSetting: too few images, a seed out of range, or a checkpoint of another run.

    References:
        Chen, Kornblith, Norouzi, Hinton (2020), A simple framework for contrastive learning of visual
        representations, algorithm 1.
    """
    if not 0 <= seed < 2**63:
        raise InvalidSetting(f"seed must be from 0 to 2^63 - 1, found {seed}")
    if len(images) < 8:
        raise InvalidSetting(f"contrastive pretraining needs at least 8 images to tell apart, found {len(images)}")
    if threads is not None and threads < 1:
        raise InvalidSetting(f"threads must be at least 1, found {threads}")
    target = resolve_device(device)
    pixels = stack_prepared(images, config.transform)
    run = _run_digest(pixels, config, seed)
    network = SimCLRNetwork(
        config.architecture,
        dict(config.options),
        channels=config.transform.channels,
        side=config.transform.crop,
        hidden=config.hidden,
        projection=config.projection,
        seed=seed,
    ).to(target)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, foreach=True
    )
    first_epoch = 0
    if checkpoint is not None and checkpoint.exists():
        first_epoch = _resume(read_checkpoint(checkpoint), run, network, optimizer)

    data = torch.from_numpy(pixels)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        for epoch in range(first_epoch, config.epochs):
            loss = _train_epoch(network, optimizer, data, config, seed=seed, epoch=epoch)
            done = epoch + 1
            if checkpoint is not None and (done % config.checkpoint_every == 0 or done == config.epochs):
                write_checkpoint(checkpoint, _snapshot(config, run, done, network, optimizer))
            if progress is not None:
                progress(done, config.epochs, loss)
    finally:
        torch.set_num_threads(before)
    return simclr_backbone(
        _snapshot(config, run, config.epochs, network, optimizer), device=device, half=None, batch_size=None
    )


def _train_epoch(
    network: SimCLRNetwork,
    optimizer: torch.optim.Optimizer,
    data: Tensor,
    config: SimCLRConfig,
    *,
    seed: int,
    epoch: int,
) -> float:
    # The set stays what it is, bytes in the process's memory: as float32 on a device, a million photos are 602 GB.
    device = next(network.parameters()).device
    generator = Generator(device=device)
    generator.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1))
    mean = torch.tensor(config.transform.mean, device=device).view(1, -1, 1, 1)
    std = torch.tensor(config.transform.std, device=device).view(1, -1, 1, 1)
    batch_size = min(config.batch_size, len(data))
    # A last, smaller batch would have fewer negatives and so another loss; the next epoch's order picks its images up.
    batches = len(data) // batch_size
    order = torch.randperm(len(data), device=device, generator=generator).cpu()
    network.train()
    total = 0.0
    steps = config.epochs * batches
    for batch in range(batches):
        chosen = to_unit_range(data[order[batch * batch_size : (batch + 1) * batch_size]].to(device))
        views = torch.cat([random_views(chosen, config.augmentation, generator=generator) for _ in range(2)])
        projections = network.project(((views - mean) / std).contiguous(memory_format=torch.channels_last))
        loss = nt_xent(*projections.chunk(2), temperature=config.temperature)
        step = epoch * batches + batch
        warm = min(1.0, (step + 1) / max(1.0, _WARMUP_SHARE * steps))
        rate = config.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()
        total += float(loss.detach())
    return total / batches


def _run_digest(pixels: NDArray[np.uint8], config: SimCLRConfig, seed: int) -> str:
    # How often a run is saved does not change what it computes, so it may change between two parts of a run.
    settings = config.model_dump_json(exclude={"checkpoint_every"})
    sha256 = hashlib.sha256(f"labeler-simclr/1 {seed} {pixels.shape}\n{settings}\n".encode())
    sha256.update(np.ascontiguousarray(pixels).data)
    return sha256.hexdigest()


def _snapshot(
    config: SimCLRConfig, run: str, epochs_done: int, network: SimCLRNetwork, optimizer: torch.optim.Optimizer
) -> Checkpoint:
    described: dict[str, Any] = {
        "architecture": config.architecture,
        "options": dict(config.options),
        "hidden": config.hidden,
        "projection": config.projection,
        "feature": config.feature,
        "transform": config.transform.model_dump(mode="json"),
    }
    finished = epochs_done == config.epochs
    state = {} if finished else optimizer.state_dict()["state"]
    moments = {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}
    return Checkpoint(described, run, epochs_done, finished, network.state_dict(), moments)


def _resume(saved: Checkpoint, run: str, network: SimCLRNetwork, optimizer: torch.optim.Optimizer) -> int:
    if saved.run != run:
        raise InvalidSetting(
            "the checkpoint belongs to another run (other images, settings or seed); "
            "delete it, or name another checkpoint file"
        )
    network.load_state_dict(saved.network)
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in saved.moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return saved.epochs_done


def random_views(images: Tensor, augmentation: Augmentation, *, generator: Generator) -> Tensor:
    """One random view of each image.

    Args:
        images: float, shape (n, channels, height, width), values in [0, 1].
        augmentation: what may change, and how far.
        generator: the source of every random number, on the images' device.

    Returns:
        Views of the same shape, values in [0, 1].
    """
    views = functional.grid_sample(
        images,
        _random_grid(images, augmentation, generator),
        mode="bilinear",
        padding_mode=augmentation.outside,
        align_corners=False,
    )
    return _random_tones(views, augmentation, generator).clamp_(0, 1)


def _uniform(generator: Generator, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)


def _random_grid(images: Tensor, augmentation: Augmentation, generator: Generator) -> Tensor:
    count = len(images)
    one = (count,)
    area = _uniform(generator, one, augmentation.crop_area, 1.0)
    spread = math.log(4 / 3) if augmentation.crop_area < 1 else 0.0
    ratio = _uniform(generator, one, -spread, spread).exp()
    width = (area * ratio).sqrt().clamp_(max=1.0)
    height = (area / ratio).sqrt().clamp_(max=1.0)
    left = (1 - width) * _uniform(generator, one, -1.0, 1.0)
    top = (1 - height) * _uniform(generator, one, -1.0, 1.0)

    angle = math.pi / 180 * _uniform(generator, one, -augmentation.rotation_degrees, augmentation.rotation_degrees)
    zoom = _uniform(generator, one, 1 - augmentation.zoom, 1 + augmentation.zoom)
    shear = _uniform(generator, one, -augmentation.shear, augmentation.shear)
    # The grid spans [-1, 1], so a share of the side is twice as much in its units.
    right, down = 2 * _uniform(generator, (2, count), -augmentation.shift, augmentation.shift)
    mirror = 1 - 2 * (_uniform(generator, one, 0.0, 1.0) < augmentation.flip).float()

    cosine, sine = angle.cos() / zoom, angle.sin() / zoom
    matrix = torch.stack(
        [
            torch.stack([mirror * width * cosine, width * (shear * cosine - sine), left + right], dim=1),
            torch.stack([mirror * height * sine, height * (shear * sine + cosine), top + down], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    if augmentation.elastic:
        cells = augmentation.elastic_cells
        coarse = torch.randn((count, 2, cells, cells), device=generator.device, generator=generator)
        bend = functional.interpolate(coarse, size=images.shape[2:], mode="bicubic", align_corners=True)
        grid = grid + 2 * augmentation.elastic * bend.permute(0, 2, 3, 1)
    return grid


def _random_tones(views: Tensor, augmentation: Augmentation, generator: Generator) -> Tensor:
    per_image = (len(views), 1, 1, 1)
    if augmentation.contrast or augmentation.brightness:
        mean = views.mean(dim=(1, 2, 3), keepdim=True)
        factor = _uniform(generator, per_image, 1 - augmentation.contrast, 1 + augmentation.contrast)
        shift = _uniform(generator, per_image, -augmentation.brightness, augmentation.brightness)
        views = (views - mean) * factor + mean + shift
    if views.shape[1] == 3 and (augmentation.saturation or augmentation.grey):
        luma = views.new_tensor(_LUMA).view(1, 3, 1, 1)
        grey = (views * luma).sum(dim=1, keepdim=True)
        keep = _uniform(generator, per_image, 1 - augmentation.saturation, 1 + augmentation.saturation)
        keep = keep * (_uniform(generator, per_image, 0.0, 1.0) >= augmentation.grey)
        views = grey + (views - grey) * keep
    if augmentation.blur:
        offsets = torch.arange(_BLUR_TAPS, device=views.device, dtype=views.dtype) - _BLUR_TAPS // 2
        taps = torch.exp(-offsets.square() / 2)
        kernel = torch.outer(taps, taps) / taps.sum().square()
        channels = views.shape[1]
        blurred = functional.conv2d(views, kernel.expand(channels, 1, -1, -1), padding=_BLUR_TAPS // 2, groups=channels)
        chosen = _uniform(generator, per_image, 0.0, 1.0) < augmentation.blur
        views = torch.where(chosen, blurred, views)
    if augmentation.noise:
        deviation = _uniform(generator, per_image, 0.0, augmentation.noise)
        views = views + deviation * torch.randn(views.shape, device=generator.device, generator=generator)
    return views


def nt_xent(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """Normalised, temperature-scaled cross entropy over a batch of pairs.

    With z the 2n L2-normalised rows of both views, s(i, j) = z_i . z_j / temperature and p(i) the other view of
    row i, the loss is the mean over all 2n rows of -log( exp s(i, p(i)) / sum over j != i of exp s(i, j) ).

    Args:
        first: projections of the first views, shape (n, d), n at least 2, any finite length.
        second: projections of the second views of the same images in the same order, shape (n, d).
        temperature: positive; small values weigh the hardest negatives most.

    Returns:
        A scalar tensor.

    Raises:
        InvalidSetting: the shapes differ, fewer than two pairs, or a temperature that is not positive.

    References:
        Chen, Kornblith, Norouzi, Hinton (2020), A simple framework for contrastive learning of visual
        representations, equation 1.
    """
    if first.shape != second.shape or first.ndim != 2 or len(first) < 2:
        raise InvalidSetting(
            "NT-Xent needs two arrays of one shape (n, d) with n at least 2; "
            f"found {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if not temperature > 0:
        raise InvalidSetting(f"temperature must be above 0, found {temperature}")
    count = len(first)
    rows = functional.normalize(torch.cat([first, second]).float(), dim=1)
    similarity = rows @ rows.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    partner = torch.arange(2 * count, device=rows.device).roll(count)
    return functional.cross_entropy(similarity, partner)


class SimCLRNetwork(nn.Module):
    """An encoder and a head of two linear layers, with initial weights that depend on the seed alone.

    Attributes:
        encoder: image to representation, shape (n, representation).
        head: representation to projection.
        representation: dimension of the encoder's output.
    """

    def __init__(
        self,
        architecture: str,
        options: dict[str, Any],
        *,
        channels: int,
        side: int,
        hidden: int,
        projection: int,
        seed: int,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if architecture == "small-conv":
                try:
                    self.encoder: nn.Module = SmallConv(channels=channels, **options)
                except TypeError as error:
                    raise InvalidSetting(f"small-conv takes only the options widths and grid: {error}") from None
            else:
                # Here: timm brings torchvision and half of torch's compiler, which a small network would wait for.
                from feature_store.backbones.network import create_timm

                self.encoder = create_timm(architecture, {"in_chans": channels, **options}, pretrained=False)
            with torch.inference_mode():
                self.representation = int(self.encoder.eval()(torch.zeros(1, channels, side, side)).shape[1])
            self.head = nn.Sequential(nn.Linear(self.representation, hidden), nn.ReLU(), nn.Linear(hidden, projection))
        self.to(memory_format=torch.channels_last)

    def project(self, images: Tensor) -> Tensor:
        """Return the rows that the loss compares, shape (n, projection)."""
        projected: Tensor = self.head(self.encoder(images))
        return projected


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
    network = SimCLRNetwork(
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


class SmallConv(nn.Module):
    """A small network for small images: enough for digits, seconds to train on a CPU.

    Stages of 3x3 convolutions with batch norm and ReLU, halved between stages, averaged to a small grid.

    The first stage, at full size, has one convolution; each later one has two, the first of which halves the side.

    The final grid (rather than one average) keeps where a stroke is, which tells a 6 from a 9.

    Args:
        channels: of the input image, 1 or 3.
        widths: output channels per stage.
        grid: side of the final grid; the feature has widths[-1] * grid**2 numbers.

    Attributes:
        num_features: dimension of the feature.
    """

    def __init__(self, *, channels: int = 3, widths: Sequence[int] = (32, 64, 128), grid: int = 2) -> None:
        super().__init__()
        if not widths or min(widths) < 1 or grid < 1 or channels not in (1, 3):
            raise InvalidSetting(
                "small-conv needs 1 or 3 channels, at least one positive width and a grid of at least 1; "
                f"found channels {channels}, widths {list(widths)}, grid {grid}"
            )
        layers: list[nn.Module] = []
        before = channels
        for stage, width in enumerate(widths):
            layers += _convolution(before, width, stride=1 if stage == 0 else 2)
            if stage:
                layers += _convolution(width, width, stride=1)
            before = width
        self.stages = nn.Sequential(*layers)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(grid), nn.Flatten())
        self.num_features = before * grid * grid

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape (n, num_features), of images of shape (n, channels, height, width)."""
        features: Tensor = self.pool(self.stages(images))
        return features


def _convolution(before: int, after: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


_FORMAT = "labeler-simclr/1"
_DESCRIBED = {"architecture", "options", "hidden", "projection", "feature", "transform"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A network during or after pretraining.

    Attributes:
        described: architecture, options, hidden, projection, feature and transform, as JSON values.
        run: digest of images, settings and seed; only the same run may be continued.
        epochs_done: how far it came.
        finished: whether that is all of it; only then it is a backbone.
        network: the tensors of encoder and head.
        moments: the optimizer's tensors, named INDEX.NAME; empty when finished.
    """

    described: Mapping[str, Any]
    run: str
    epochs_done: int
    finished: bool
    network: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file in one step, so that a crash leaves the earlier checkpoint whole."""
    tensors = {f"network.{name}": tensor.cpu().contiguous() for name, tensor in checkpoint.network.items()}
    tensors |= {f"moments.{name}": tensor.cpu().contiguous() for name, tensor in checkpoint.moments.items()}
    header = {
        "described": dict(checkpoint.described),
        "run": checkpoint.run,
        "epochs_done": checkpoint.epochs_done,
        "finished": checkpoint.finished,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(save(tensors, metadata={"format": _FORMAT, "header": json.dumps(header, sort_keys=True)}))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        BadData: no such file, no safetensors file, damaged, or not written by SimCLR pretraining here.
    """
    if not path.is_file():
        raise BadData(f"no checkpoint file {path.name!r} in the folder named; check the path")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise BadData(f"checkpoint {path.name!r} is no safetensors file, or damaged: {error}") from None
    try:
        header = json.loads(metadata["header"]) if metadata.get("format") == _FORMAT else None
        if header is None or header["described"].keys() != _DESCRIBED:
            raise KeyError
        return Checkpoint(
            header["described"],
            str(header["run"]),
            int(header["epochs_done"]),
            bool(header["finished"]),
            _under("network.", tensors),
            _under("moments.", tensors),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise BadData(
            f"{path.name!r} holds weights but no SimCLR checkpoint of this project; "
            'to use weights of another origin, write a backbone file with kind = "timm"'
        ) from None


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
