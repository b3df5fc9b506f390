"""Commands about shards: `embed` images, list `duplicates`, `declare` a bound, `delete` records, and `pretrain`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from feature_store.image_files import Skipped, in_words
from labeler.errors import IdenticalImages, InvalidSetting, NoUsableImage
from workers.commands.console import Json, escaped, one_of, print_json, tell, tell_warning

BackboneOption = Annotated[
    str | None,
    typer.Option(
        help="What makes features: efficientnet-lite0 (default) or -lite2 (no download), timm name, backbone file "
        "(TOML), a safetensors file with --architecture, a SimCLR checkpoint, or pixels."
    ),
]
ArchitectureOption = Annotated[
    str | None,
    typer.Option(help="timm architecture of the weights, where --backbone is a safetensors file of them."),
]
ClassesOption = Annotated[
    str | None,
    typer.Option(
        help="Public class names, comma separated, in label order. A name with a comma stands in double quotes. "
        "Default: folder names."
    ),
]
PersonLevelOption = Annotated[
    int | None,
    typer.Option(help="Depth of the folder that names the person of an image: 2 for CLASS/PERSON/IMAGE."),
]
MaxRecordsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Declare that the site never holds more private images; more are refused."),
]


def embed(
    out: Annotated[Path, typer.Option(help="The shard to write.")],
    source: Annotated[
        str | None, typer.Argument(help="Folder of class folders, Parquet file, or torchvision:NAME?root=DIR.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="Features that you computed yourself: .npz, .npy, .parquet or .h5.")
    ] = None,
    backbone_name: Annotated[
        str | None, typer.Option(help="With --features: what all parties call the backbone that made them.")
    ] = None,
    fitted_on: Annotated[
        str | None,
        typer.Option(help="With --features: the backbone was fitted on public, other-records or voting-records."),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="With --features: the published probe's features, by the same backbone.")
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(
            help="With --features: where the ids of its rows are. Name an array of that file, or another file: .npy, "
            "or a text with one id on each line. Default: the array ids, if the file has one."
        ),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="With --features: where the labels of its rows are. Name them as for --ids.")
    ] = None,
    backbone: BackboneOption = None,
    architecture: ArchitectureOption = None,
    classes: ClassesOption = None,
    public: Annotated[
        bool, typer.Option("--public", help="These are public images: keep thumbnails for reports.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:N.")] = "auto",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, max=65_536, help="Images in a forward pass. Default: 256 on a GPU, 32 in torch on a CPU."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads that read and decode images. Default: one for each core."),
    ] = None,
    person_level: PersonLevelOption = None,
    persons: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with the columns file and person: whose image each is. With --features also an "
            "array of its file, or a file of lines."
        ),
    ] = None,
    person_column: Annotated[
        str | None, typer.Option(help="Column of the Parquet file that says whose image each is.")
    ] = None,
    duplicates: Annotated[
        str | None,
        typer.Option(
            help="What to do with identical private images. keep-first, the default, keeps the first of them; refuse "
            "stops; keep-all keeps all of them."
        ),
    ] = None,
    site_key: Annotated[
        Path | None, typer.Option(help="The site's key for digests of people and images. Default: beside the shard.")
    ] = None,
    max_records: MaxRecordsOption = None,
    attributes: Annotated[
        Path | None,
        typer.Option(help="Several labels per image: a CSV of file and attributes as 1 and 0, or CelebA's own table."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="With CelebA's table: embed one part only, train, valid or test. CelebA's list names it."),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Embed by Ray, on all processors and GPUs of this machine.")
    ] = False,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Embed by the Ray cluster that this party runs there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn images into a shard of features. Resumes after an interruption.

    Damaged images are listed and skipped, and the command then exits with 1. Hidden files, Thumbs.db and texts are
    ignored. Of identical private images the first is kept, or none if their labels differ. A table next to the shard
    lists them.

    Say whose images are whose, so that a task can bound how many of one person's vote (records_per_person). Names of
    people are stored as digests under the site's key. Back up the key, and use one for all shards of a site.

    An agent of a service needs a bound on its records (--max-records). The agent answers as late as that many records
    would need, so the time of an answer does not tell how many it has. The bound is public: choose a round number, with
    room, before you count. Tasks that train models (blind-average, aux-distill) need half the noise if every site keeps
    one.

    Images may have several labels each: attributes, from a table (--attributes) or a folder in CelebA's layout.

    Features of your own backbone, of images or of texts, come in a file (--features) with the arrays features, labels
    and, if you like, ids and persons. Every party embeds one published probe with the same backbone and gives its
    features, too (--probe): if they differ, nothing is asked.

    Examples:

    `labeler embed hospital-a/ --out hospital-a.shard --classes healthy,ill --max-records 10000`

    `labeler embed celeba/ --split train --out faces.shard --classes Smiling,Eyeglasses,Young`

    `labeler embed hospital-a/ --out hospital-a.shard --classes healthy,ill --person-level 2`

    `labeler embed scans.parquet --out a.shard --classes healthy,ill --person-column patient`

    `labeler embed --features a.npz --out a.shard --classes healthy,ill --backbone-name hashing-svd --fitted-on public
    --probe probe.npz`

    `labeler embed million-scans/ --out scans.shard --public --ray`

    `labeler embed scans/ --backbone weights.safetensors --architecture resnet50 --out scans.shard --public`
    """
    from feature_store.backbones.spec import DEFAULT_BACKBONE
    from feature_store.embedding import Duplicates
    from feature_store.own_features import FittedOn
    from feature_store.sources import PersonColumn
    from workers.embedder.shards import embed_features, embed_images, told
    from workers.progress import progress_bars

    policy = None if duplicates is None else one_of("duplicates", duplicates, get_args(Duplicates))
    is_table = features is None or (persons is not None and persons.suffix == ".csv")
    is_told = (person_level, persons, person_column) != (None, None, None)
    people = PersonColumn(person_level, persons, person_column) if is_told and is_table else None
    _check_options(
        source,
        features,
        of_features={"backbone-name": backbone_name, "fitted-on": fitted_on, "probe": probe, "ids": ids}
        | {"labels": labels},
        of_images={"backbone": backbone, "architecture": architecture, "attributes": attributes, "split": split}
        | {"person-level": person_level, "ray": ray or None, "ray-address": ray_address},
    )
    try:
        with naming_skipped(as_json=as_json), progress_bars(quiet=as_json) as progress:
            if features is not None:
                column = persons or person_column
                result = embed_features(
                    features,
                    out,
                    backbone_name=backbone_name,
                    fitted_on=None if fitted_on is None else one_of("fitted-on", fitted_on, get_args(FittedOn)),
                    probe=probe,
                    ids=ids,
                    labels=labels,
                    persons=people or (None if column is None else str(column)),
                    classes=names_of(classes),
                    public=public,
                    duplicates=policy,
                    key=site_key,
                    max_records=max_records,
                )
            else:
                result = embed_images(
                    str(source),
                    backbone or DEFAULT_BACKBONE,
                    out,
                    architecture=architecture,
                    classes=names_of(classes),
                    public=public,
                    device=device,
                    batch_size=batch_size,
                    threads=threads,
                    persons=people,
                    duplicates=policy,
                    key=site_key,
                    max_records=max_records,
                    attributes=attributes,
                    split=split,
                    ray=ray_address or ("" if ray else None),
                    progress=progress,
                )
    except IdenticalImages as error:
        if not as_json:
            _list_duplicates(told(error.groups))
            raise
        print_json({"error": str(error), "duplicates": told(error.groups)})
        sys.exit(error.exit_code)
    print_embed(result, backbone_name or Path(backbone or DEFAULT_BACKBONE).name, as_json=as_json)


def _check_options(
    source: str | None, features: Path | None, *, of_features: Mapping[str, object], of_images: Mapping[str, object]
) -> None:
    """Refuse two sources, no source, and options that belong to the other source."""
    if (source is None) == (features is None):
        raise InvalidSetting("name one source: images (a folder, Parquet, torchvision:NAME), or --features FILE")
    foreign = of_features if features is None else of_images
    named = [f"--{name}" for name, value in foreign.items() if value is not None]
    if named:
        other = "--features" if features is None else "images"
        raise InvalidSetting(f"{', '.join(named)} goes with {other} and not with this source; leave it out")


def duplicates(
    shard: Annotated[Path, typer.Argument(help="A finished shard.")],
    as_json: Json = False,
) -> None:
    """List images that a shard holds more than once, those with different labels first.

    Exits with 1 if there are any. Shards of early versions, without digests of images, are compared only by features.

    Example: `labeler duplicates hospital-a.shard`
    """
    from workers.embedder.shards import same_images_of

    result = same_images_of(shard)
    if as_json:
        print_json(result)
    else:
        _list_duplicates(result["duplicates"])
        typer.echo(f"compared by {' and '.join(result['compared'])}: {len(result['duplicates'])} images more than once")
    if result["duplicates"]:
        sys.exit(1)


def declare(
    shard: Annotated[Path, typer.Argument(help="A private shard.")],
    max_records: Annotated[
        int, typer.Option(min=1, help="The most records it will ever hold: round, with room, chosen before counting.")
    ],
    as_json: Json = False,
) -> None:
    """Declare a public bound on the records of a shard that was embedded without one.

    It cannot be changed later. An agent of a service needs one. The agent answers as late as that many records would
    need, so the time of an answer does not tell how many it has (docs/public-clock.md). The bound is a public number:
    do not derive it from a count.

    Example: `labeler declare hospital-a.shard --max-records 10000`
    """
    from feature_store.shard import declare_most

    is_new = declare_most(shard, max_records)
    said = f"{shard} declares at most {max_records} records" + ("" if is_new else ", as before")
    tell({"shard": str(shard), "max_records": max_records}, said, as_json=as_json)


def delete(
    shard: Annotated[Path, typer.Argument(help="A finished shard.")],
    persons: Annotated[
        Path | None, typer.Option(help="File of people whose records are deleted, one name a line; - reads them here.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="File of images, named as in the source, one a line; - reads them here.")
    ] = None,
    site_key: Annotated[
        Path | None, typer.Option(help="The site's key that the shard was made with. Default: beside the shard.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete the records of people, or of images, from a shard and from the bytes of its files.

    Everything named is deleted, or nothing. A running agent continues without them, with no restart. The shard is
    rewritten next to the old files, so it needs room for a second copy. Remaining copies elsewhere are listed. Earlier
    releases stay covered by their price.

    After an interruption, give the same command again: it deletes what is left to delete. If it finds none of the
    names, they are deleted already. Without names it only erases what an earlier deletion marked.

    Example: `labeler delete hospital-a.shard --persons leaving.txt`
    """
    from workers.embedder.shards import delete_records, lines_of

    result = delete_records(
        shard,
        persons=[] if persons is None else lines_of(persons),
        images=[] if images is None else lines_of(images),
        key=site_key,
    )
    said = f"{result['deleted']} records were deleted, {result['left']} are left in {shard}"
    if persons is None and images is None and not result["erased"]:
        said += "\nNo record was marked as deleted. If a deletion was interrupted, give it again with its names."
    remains = "".join(f"\n  {sentence}" for sentence in result["remains"])
    said += f"\nNo file of the shard holds a deleted record any more. What remains elsewhere:{remains}"
    tell(result, said, as_json=as_json)


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
    from workers.embedder.shards import pretrain_backbone
    from workers.progress import progress_bars

    with progress_bars(quiet=as_json) as progress:
        result = pretrain_backbone(source, out, architecture=architecture, epochs=epochs, seed=seed, progress=progress)
    said = f"Backbone {result['fingerprint'][:12]} ({result['dimension']} features) is in {out}"
    tell(result, said, as_json=as_json)


def names_of(classes: str | None) -> tuple[str, ...] | None:
    """Return the names of a class list as people write it: a line of CSV, where quotes hold a comma.

    Raises:
        InvalidSetting: a quote is not closed, or there are several lines.
    """
    if classes is None:
        return None
    try:
        ((first, *more),) = csv.reader([classes], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError):
        raise InvalidSetting(
            "--classes takes names separated by commas; a name with a comma stands in double quotes: "
            "--classes '\"Adenocarcinoma, NOS\",normal'"
        ) from None
    return tuple(name.strip() for name in (first, *more))


def print_embed(result: dict[str, Any], backbone: str, *, as_json: bool) -> None:
    """Say what became of a source; exit with 1 where images were skipped."""
    if as_json:
        print_json(result)
    else:
        _say_embed(result, backbone)
    if result["skipped"]:
        sys.exit(1)


def _say_embed(result: dict[str, Any], backbone: str) -> None:
    typer.echo(f"{result['records']} images are in {result['out']} (backbone {backbone}, {result['fingerprint'][:12]})")
    counts = {
        "Left out as copies of other images": result["copies"],
        "Left out because identical images have different labels": result["contradictions"],
        "Images that several people have, kept with each of them": result["shared"],
    }
    for what, count in counts.items():
        if count:
            typer.echo(f"{what}: {count}")
    if result["listed"]:
        typer.echo(f"Identical images are listed in {result['listed']}; delete it once you have looked at it")
    elif result["duplicates"]:
        typer.echo(f"{len(result['duplicates'])} images are there more than once: labeler duplicates {result['out']}")
    for note in result["notes"]:
        typer.echo(note)
    if passed := result["passed_over"]:
        shown = in_words([Skipped(**one) for one in passed])
        tell_warning(f"passed over {len(passed)} {'file' if len(passed) == 1 else 'files'} of no image: {shown}")
    _list_skipped([(one["source"], one["reason"]) for one in result["skipped"]])


@contextmanager
def naming_skipped(*, as_json: bool) -> Iterator[None]:
    """Print the name of each image of a source of which none can be used."""
    try:
        yield
    except NoUsableImage as error:
        if not as_json:
            _list_skipped(error.left_out)
            raise
        skipped = [{"source": source, "reason": reason} for source, reason in error.left_out]
        print_json({"error": str(error), "skipped": skipped})
        sys.exit(error.exit_code)


def _list_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """Print the name of each image that was left out, and why; only the site's own people see this terminal."""
    for source, reason in skipped:
        typer.echo(f"skipped {escaped(source)}: {reason}", err=True)
    if skipped:
        typer.echo(f"Images that could not be read and were skipped: {len(skipped)}", err=True)


def _list_duplicates(groups: list[dict[str, Any]]) -> None:
    """Print the names of files that hold the same image; only the site's own people see this terminal."""
    for group in groups:
        said = f" ({group['contradiction']})" if group["contradiction"] else ""
        typer.echo(f"the same image{said}: {', '.join(escaped(source) for source in group['sources'])}", err=True)
