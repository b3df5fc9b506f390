"""A released model as a file that travels alone: safetensors, with its privacy card in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save


def model_file(
    arrays: Mapping[str, NDArray[np.generic]], *, kind: str, classes: tuple[str, ...], card: Mapping[str, Any]
) -> bytes:
    """The bytes of a safetensors file.

    Args:
        arrays: what the model consists of, by name.
        kind: what reads it: "linear" for the model of a blind average, else the kind of a student.
        classes: names of the classes, in the order of labels.
        card: see `labeler.privacy_card`.
    """
    about = {"kind": kind, "classes": list(classes), "privacy_card": dict(card)}
    # One entry: several would be written in an order that differs from process to process.
    metadata = {"labeler": json.dumps(about, sort_keys=True, allow_nan=False)}
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata)
