"""Writing a report into a folder: each file appears whole or not at all, the page last."""

from __future__ import annotations

from pathlib import Path

from feature_store.durable import replace_file
from workers.report.model import JobReport
from workers.report.page import render_page
from workers.report.pictures import PICTURE_FILES, draw_pictures


def write_report(report: JobReport, out: Path) -> None:
    """Write OUT/report.html and its pictures as PNG files.

    Everything is made before the first file is written. Pictures of an earlier report that this one has no
    data for are removed, so that a folder never shows two jobs. `report.json` and `pseudo_labels.parquet`,
    to which the page links, are the caller's to write.

    Args:
        out: the folder; made if it is missing.

    Raises:
        UnreadableImage: a thumbnail is not a readable PNG image; nothing is written.
    """
    pictures = draw_pictures(report)
    page = render_page(report, pictures)
    out.mkdir(parents=True, exist_ok=True)
    for picture in pictures.values():
        replace_file(out / picture.file_name, picture.png)
    current = {picture.file_name for picture in pictures.values()}
    for name in PICTURE_FILES:
        if name not in current:
            (out / name).unlink(missing_ok=True)
    replace_file(out / "report.html", page.encode())
