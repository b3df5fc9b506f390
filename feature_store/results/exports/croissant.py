"""Labels with a Croissant description (MLCommons, version 1.1): what is in the file, and what it reveals at most.

Croissant describes data sets to search engines and loaders; provenance is PROV-O, the W3C's vocabulary. The privacy
card travels in it: unit, epsilon, delta, mechanism and task, each under a name that says what it is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from feature_store.results.exports.pictures import check_new
from feature_store.results.image_labels import ImageStamp, stamp_of
from labeler.system.files import replace_file, replacing

if TYPE_CHECKING:
    from feature_store.results.exports import Wanted

LABELS_FILE = "labels.parquet"
CROISSANT_FILE = "croissant.json"

_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "prov": "http://www.w3.org/ns/prov#",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
_COLUMNS = (
    ("source", "sc:Text", "Name of the image, as it was sent."),
    ("label", "sc:Integer", "Number of the class, from 0."),
    ("label_name", "sc:Text", "Name of the class."),
    ("confidence", "sc:Float", "Calibrated probability that the label is right."),
    ("origin", "sc:Text", "asked: a question itself; inferred: the label follows from other answers."),
)


def write_croissant(wanted: Wanted) -> Path:
    """Write `labels.parquet` and `croissant.json` into a folder; the description last."""
    stamp = stamp_of(wanted.table)
    check_new(wanted.out)
    wanted.out.mkdir(parents=True, exist_ok=True)
    labels = wanted.out / LABELS_FILE
    with replacing(labels) as temporary, temporary.open("wb") as file:
        pq.write_table(wanted.table, file)
    digest = hashlib.sha256(labels.read_bytes()).hexdigest()
    document = describe(stamp, count=len(wanted.table), sha256=digest, size=labels.stat().st_size)
    replace_file(wanted.out / CROISSANT_FILE, json.dumps(document, ensure_ascii=False, indent=1).encode())
    return wanted.out


def describe(stamp: ImageStamp, *, count: int, sha256: str, size: int) -> dict[str, Any]:
    """The Croissant document of a table of labels.

    Args:
        stamp: of the job.
        count: rows.
        sha256, size: of the Parquet file.
    """
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": f"labels-{stamp.job_id}",
        "description": f"Labels of {count} public images, given by private images that stay with their owners. "
        f"Classes: {', '.join(stamp.classes)}.",
        "version": "1.0.0",
        "datePublished": stamp.created_at[:10],
        "url": f"urn:labeler:job:{stamp.job_id}",
        "citeAs": f"private-labeler, job {stamp.job_id}, task {stamp.task_digest}",
        "rai:personalSensitiveInformation": _guarantee_in_words(stamp),
        "prov:wasGeneratedBy": {
            "@type": "prov:Activity",
            "@id": f"urn:labeler:job:{stamp.job_id}#labelling",
            "prov:label": "Private labelling: noised votes of several owners' records, then a student",
            "prov:endedAtTime": stamp.created_at,
            "prov:used": {"@type": "prov:Entity", "@id": f"urn:labeler:task:{stamp.task_digest}"},
            "sc:additionalProperty": [
                {"@type": "sc:PropertyValue", "name": name, "value": value} for name, value in _properties(stamp)
            ],
        },
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": "labels",
                "name": LABELS_FILE,
                "contentUrl": LABELS_FILE,
                "contentSize": f"{size} B",
                "encodingFormat": "application/x-parquet",
                "sha256": sha256,
            }
        ],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "images",
                "name": "images",
                "description": "One row for each public image.",
                "field": [
                    {
                        "@type": "cr:Field",
                        "@id": f"images/{name}",
                        "name": name,
                        "description": words,
                        "dataType": kind,
                        "source": {"fileObject": {"@id": "labels"}, "extract": {"column": name}},
                    }
                    for name, kind, words in _COLUMNS
                ],
            }
        ],
    }


def _properties(stamp: ImageStamp) -> list[tuple[str, object]]:
    """The privacy card, flat: `instance.epsilon`, `delta`, ...; what has no bound says so."""
    found: list[tuple[str, object]] = []
    for name, value in sorted(stamp.privacy.items()):
        if isinstance(value, dict):
            found += [(f"{name}.{key}", "no bound" if one is None else one) for key, one in sorted(value.items())]
        else:
            found.append((name, "no bound" if value is None else value))
    return [*found, ("simulation with a known seed", stamp.is_seeded)]


def _guarantee_in_words(stamp: ImageStamp) -> str:
    instance: Any = stamp.privacy.get("instance", {})
    epsilon = instance.get("epsilon") if isinstance(instance, dict) else None
    bound = "no bound" if epsilon is None else f"epsilon {epsilon:.6g} at delta {stamp.privacy.get('delta')}"
    return (
        "No private image is in this data set. What its labels reveal about any one of them is bounded by differential "
        f"privacy: {bound} per private image. {stamp.privacy.get('holds_against', '')}"
    ).strip()
