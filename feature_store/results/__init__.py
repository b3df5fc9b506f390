"""Files that a job leaves on disk: one codec per kind of file, for the service and for `labeler run`.

questions       jobs/JOB/questions.safetensors, or failed.json and why; what the embedder is asked for
job_process     the program that makes questions and labels images
pseudo_labels   the table of answers, as Parquet
image_labels    what the student says of every public image
models          a released model as a file that travels alone
exports         labels as other tools want them
evidence        what a party can show, signed and printed
report          the page for people

Bytes that are stored or handed out do not change between versions: tests/golden/test_job_files.py holds their digests.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

ExportFormat = Literal["hf", "croissant", "label-studio", "image-folder", "csv"]
EXPORT_FORMATS: Final[tuple[ExportFormat, ...]] = get_args(ExportFormat)
FOLDER_FORMATS: Final[frozenset[str]] = frozenset({"hf", "croissant", "image-folder"})
"""What these write is a folder; of the others a file. A command names them before it loads what writes."""
