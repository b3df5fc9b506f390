"""Commands that make what a job needs: `embed` images into a shard, `pretrain` a backbone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from workers.commands.console import Json, print_json


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(embed)
    app.command()(pretrain)


def embed(
    source: Annotated[str, typer.Argument(help="Folder of class folders, Parquet file, or torchvision:NAME?root=DIR.")],
    backbone: Annotated[str, typer.Option(help="Backbone file (TOML), SimCLR checkpoint, timm name, or pixels.")],
    out: Annotated[Path, typer.Option(help="The shard to write.")],
    classes: Annotated[
        str | None, typer.Option(help="Public class names, comma separated, in label order. Default: folder names.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="These are public images: keep thumbnails for reports.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images embedded at a time.")] = 32,
    as_json: Json = False,
) -> None:
    """Turn images into a shard of features. Continues where it was interrupted.

    Unreadable images are listed and skipped, and the command then ends with exit code 1.

    Example: `labeler embed hospital-a/ --backbone resnet50 --out hospital-a.shard --classes healthy,ill`
    """
    from workers.embedder import embed_images
    from workers.progress import progress_bars

    names = tuple(name.strip() for name in classes.split(",")) if classes is not None else None
    with progress_bars(quiet=as_json) as progress:
        result = embed_images(
            source, backbone, out, classes=names, public=public, batch_size=batch_size, progress=progress
        )
    _print_embed(result, as_json=as_json)
    if result["skipped"]:
        sys.exit(1)


def pretrain(
    source: Annotated[str, typer.Argument(help="Public images: folder, Parquet file, or torchvision:NAME?root=DIR.")],
    out: Annotated[Path, typer.Option(help="The backbone to write.")],
    architecture: Annotated[str, typer.Option(help="small-conv or any timm architecture.")] = "small-conv",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Public seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Pretrain a SimCLR backbone on public images. Continues from its last checkpoint.

    Example: `labeler pretrain public-images/ --out backbone --architecture small-conv --epochs 200`
    """
    from workers.embedder import pretrain_backbone
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        result = pretrain_backbone(source, out, architecture=architecture, epochs=epochs, seed=seed, progress=progress)
    if as_json:
        print_json(result)
    else:
        typer.echo(f"Backbone {result['fingerprint'][:12]} ({result['dimension']} features) is in {out}")


def _print_embed(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    typer.echo(f"{result['records']} images are in {result['out']}, backbone {result['fingerprint']}")
    for note in result["notes"]:
        typer.echo(note)
    for skipped in result["skipped"]:
        typer.echo(f"skipped {skipped['source']}: {skipped['reason']}", err=True)
    if result["skipped"]:
        typer.echo(f"{len(result['skipped'])} images could not be read and were skipped", err=True)
