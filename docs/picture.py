"""README's first result, made by `make picture`: the lines that `make demo` prints, and the picture of its report.

Both are of the one demo in `demo/`. The picture's file keeps the lines, so a test sees when one was made without the
other.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
PICTURE, README = ROOT / "docs" / "report.png", ROOT / "README.md"
LINES = "what the demo printed"
"""The name of the lines in the picture's file."""

BLOCK = re.compile(r"(?<=```\n)Labels  .*?(?=```\n)", re.DOTALL)
"""The lines in README."""


def main() -> None:
    """Write README's lines of the demo's report.json, and note them in the picture that Chromium made."""
    from workers.commands.jobs import tell_summary

    os.environ["COLUMNS"] = "80"
    summary = json.loads((ROOT / "demo" / "report.json").read_text())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tell_summary(summary, Path("demo"), as_json=False)
    lines = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().strip("\n").split("\n"))
    README.write_text(BLOCK.sub(lambda _: lines, README.read_text(), count=1))
    noted = PngInfo()
    noted.add_text(LINES, lines)
    Image.open(PICTURE).quantize(128).save(PICTURE, optimize=True, pnginfo=noted)


if __name__ == "__main__":
    main()
