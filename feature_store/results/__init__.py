"""Files that a job leaves on disk: one codec per kind of file, for the service and for `labeler run`.

questions       jobs/JOB/questions.safetensors, or failed.json and why; what the embedder is asked for
job_process     the program that makes questions and labels images
pseudo_labels   the table of answers, as Parquet
image_labels    what the student says of every public image
models          a released model as a file that travels alone
exports         labels as other tools want them; label_files: those that are one file, in pieces
evidence        what a party can show, signed and printed
report          the page for people

Bytes that are stored or handed out do not change between versions: tests/golden/test_job_files.py holds their digests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

FileFormat = Literal["parquet", "jsonl", "csv", "label-studio", "label-studio-config"]
FolderFormat = Literal["hf", "croissant", "image-folder"]
ExportFormat = FileFormat | FolderFormat
"""The names of export formats, the same for the command line, REST and Python. REST sends files, so it has no folders:
the command line makes those of a service's job here, of the same table."""

FILE_FORMATS: Final[tuple[FileFormat, ...]] = get_args(FileFormat)
FOLDER_FORMATS: Final[tuple[FolderFormat, ...]] = get_args(FolderFormat)
EXPORT_FORMATS: Final[tuple[ExportFormat, ...]] = (*FOLDER_FORMATS, *FILE_FORMATS)

RENAMED: Final = {"image-folder-csv": "csv"}
"""Names of released versions, still taken, and the names that replace them (docs/upgrades.md)."""


def current_format(name: str) -> str:
    """Return the name that a format has now."""
    return RENAMED.get(name, name)


@dataclass(frozen=True)
class FileKind:
    """A format of one file.

    Attributes:
        title: for people.
        media_type: for HTTP.
        suffix: the end of its name.
    """

    title: str
    media_type: str
    suffix: str

    def file_name(self, job_id: str, of: Literal["images", "questions"]) -> str:
        """Return the name under which a browser saves it."""
        what = "labels" if of == "images" else "questions"
        return f"{job_id}-{what}.{self.suffix}" if self.suffix != "csv" else "metadata.csv"


FILE_KINDS: Final[dict[FileFormat, FileKind]] = {
    "jsonl": FileKind("JSON lines", "application/jsonl", "jsonl"),
    "parquet": FileKind("Parquet", "application/vnd.apache.parquet", "parquet"),
    "label-studio": FileKind("Label Studio", "application/json", "label-studio.json"),
    "label-studio-config": FileKind("Label Studio's labeling setup", "application/xml", "label-studio.config.xml"),
    "csv": FileKind("CSV for an image folder", "text/csv", "csv"),
}
"""Apart from what writes them, so that a command lists names before it loads a library."""
