"""One Parquet file, read whole: for files of ours, whose reading should cost what is in them.

`pyarrow.parquet.read_table` makes a data set of whatever it is given, which takes several times as long as reading a
small file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in a file, with the metadata of its schema.

    Args:
        columns: only these, in this order; all where absent.

    Raises:
        OSError: the file cannot be read; FileNotFoundError where there is none.
        pyarrow.ArrowException: it is no Parquet file, or is damaged.
        KeyError: it lacks a column.
    """
    with path.open("rb") as opened, pq.ParquetFile(opened) as file:
        found = file.read(columns=None if columns is None else list(columns), use_threads=False)
    return found if columns is None else found.select(list(columns))
