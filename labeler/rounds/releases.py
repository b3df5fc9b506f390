"""What a round opened, as it is stored: a row of the coordinator's journal, a file in the folder of a `labeler run`."""

from __future__ import annotations

import json

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from labeler.errors import BadData, LabelerError
from labeler.release import Release

RELEASE_VERSION = "labeler-release/1"


def release_to_bytes(release: Release) -> bytes:
    """A release as it is stored; equal releases are equal bytes."""
    arrays = {"labels": np.ascontiguousarray(release.labels, dtype=np.int16)}
    if release.noisy_votes is not None:
        arrays["noisy_votes"] = np.ascontiguousarray(release.noisy_votes, dtype=np.float64)
    about = {
        "version": RELEASE_VERSION,
        "kind": release.kind,
        "contributors": sorted(release.contributors),
        "is_seeded": release.is_seeded,
    }
    # One entry: several would be written in an order that differs from process to process.
    return save(arrays, {"release": json.dumps(about, sort_keys=True, separators=(",", ":"))})


def release_from_bytes(data: bytes) -> Release:
    """A release from its stored bytes.

    Raises:
        BadData: they are damaged, or of another version.
    """
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["release"])
        labels, votes = arrays["labels"], arrays.get("noisy_votes")
        if about["version"] != RELEASE_VERSION or labels.dtype != np.int16 or labels.ndim != 1:
            raise ValueError
        if votes is not None and (
            votes.dtype != np.float64 or votes.ndim != 2 or len(votes) != len(labels) or not np.isfinite(votes).all()
        ):
            raise ValueError
        return Release(
            kind=about["kind"],
            labels=labels,
            noisy_votes=votes,
            contributors=frozenset(str(agent) for agent in about["contributors"]),
            is_seeded=bool(about["is_seeded"]),
        )
    except (SafetensorError, ValueError, KeyError, TypeError, LabelerError):
        raise BadData("a stored release is damaged, or of another version; restore the journal from a backup") from None
