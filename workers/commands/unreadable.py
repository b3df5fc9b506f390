"""Images of a folder that nobody could read, found here before any of them is sent."""

from __future__ import annotations

from pathlib import Path

from labeler.errors import InvalidSetting, UnreadableImage


def unreadable_images(folder: Path, names: list[str]) -> dict[str, str]:
    """Which images of a folder cannot be read, and why: judged as the embedder judges them.

    Raises:
        InvalidSetting: it is no folder, or none of them can be read.
    """
    from feature_store.decode import decode_image

    if not folder.is_dir():
        raise InvalidSetting(
            f"--skip-unreadable looks into a folder of images, and {folder.name!r} is none; unpack it first"
        )
    found = {}
    for name in names:
        try:
            decode_image(folder / name).close()
        except UnreadableImage as error:
            found[name] = str(error)
    if names and len(found) == len(names):
        first = found[names[0]]
        raise InvalidSetting(f"none of the {len(names)} images in {folder.name!r} can be read; of the first: {first}")
    return found
