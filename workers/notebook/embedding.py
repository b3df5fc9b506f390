"""Images to features, from a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from feature_store.backbone_names import DEFAULT_BACKBONE

if TYPE_CHECKING:
    from feature_store.embedding import Duplicates
    from feature_store.sources import PersonColumn

SHARD_SUFFIX = ".shard"


@dataclass(frozen=True)
class EmbeddedImages:
    """Images that were turned into a shard of features.

    Attributes:
        path: the shard.
        records: how many images are in it. For a private shard this is its owner's to know.
        classes: in label order.
        fingerprint: of the backbone; shards of one job share it.
        skipped: images that could not be read, with the reason.
    """

    path: Path
    records: int
    classes: tuple[str, ...]
    fingerprint: str
    skipped: tuple[tuple[str, str], ...] = ()

    def __fspath__(self) -> str:
        return str(self.path)


def embed(
    source: str | Path,
    out: str | Path | None = None,
    *,
    backbone: str | Path = DEFAULT_BACKBONE,
    architecture: str | None = None,
    classes: Sequence[str] | None = None,
    public: bool = False,
    persons: PersonColumn | None = None,
    duplicates: Duplicates | None = None,
    max_records: int | None = None,
    quiet: bool = False,
) -> EmbeddedImages:
    """Turn images into a shard. A finished shard of the same images is taken as it is, an interrupted one goes on.

    Args:
        source: folder of class folders, Parquet file, or torchvision:NAME?root=DIR.
        out: the shard to write; beside the source when None (`scans` gives `scans.shard`).
        backbone, architecture: see feature_store.backbones.load_backbone; the default needs no download.
        classes: PUBLIC class names in label order. Private images need them.
        public: these are public images: thumbnails are kept for reports.
        persons: whose images are whose (feature_store.sources).
        duplicates: what becomes of private images that are there twice: "refuse", "keep-first" or "keep-all".
        max_records: a public bound on private images, declared before they are counted; more are refused.
        quiet: no progress bar.

    Raises:
        BadData, InvalidSetting, IdenticalImages: see feature_store.embedding.embed_source.
    """
    from feature_store.named_files import named_path
    from workers.embedder.shards import embed_images
    from workers.progress import progress_bars

    named_path(source, "source")
    path = _beside(source) if out is None else named_path(out, "out")
    names = None if classes is None else tuple(classes)
    with progress_bars(quiet=quiet) as progress:
        made = embed_images(
            source,
            backbone,
            path,
            architecture=architecture,
            classes=names,
            public=public,
            persons=persons,
            duplicates=duplicates,
            max_records=max_records,
            progress=progress,
        )
    return EmbeddedImages(
        path,
        made["records"],
        tuple(made["classes"]),
        made["fingerprint"],
        tuple((one["source"], one["reason"]) for one in made["skipped"]),
    )


def _beside(source: str | Path) -> Path:
    text = str(source)
    if "://" in text or text.startswith("torchvision:"):
        from labeler.errors import InvalidSetting

        raise InvalidSetting(f"say where the shard of {text.partition('?')[0]!r} is to be written: out=...")
    path = Path(source)
    return path.with_name(path.name + SHARD_SUFFIX) if path.is_dir() else path.with_suffix(SHARD_SUFFIX)
