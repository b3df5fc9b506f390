"""A contact sheet: what was asked, and the label that came back.

Sixty small pictures with a word below each are pasted, not plotted: axes would sample every one of them anew and lay
out every word, which took longer than labelling a few hundred images.
"""

from __future__ import annotations

import io
import math

import numpy as np
from matplotlib.font_manager import FontProperties, findfont
from PIL import Image, ImageDraw, ImageFont

from labeler.rounds.effects import AnswerStatus
from workers.report.canvas import FONT, INK, MUTED, PNG_DPI, RIGHT, SURFACE, WRONG, Picture, legible
from workers.report.model import JobReport
from workers.report.thumbnails import choose, is_tiny, open_picture
from workers.report.words import count

_MOST_TILES = 60
_COLUMNS = 10
_MARGIN, _TILE, _GAP, _LINE = 16, 138, 12, 192
"""Pixels: around the sheet, a picture's longest side, between pictures, and from the top of one line to the next."""

_POINTS = 8.0


def answers(report: JobReport) -> Picture | None:
    """The sheet; None where no question has a picture."""
    tiles = [query for _, query in choose(report) if query.thumbnails]
    if not tiles:
        return None
    tiles = [tiles[place] for place in np.unique(np.linspace(0, len(tiles) - 1, _MOST_TILES).round().astype(int))]
    columns = min(_COLUMNS, len(tiles))
    width = 2 * _MARGIN + columns * (_TILE + _GAP) - _GAP
    sheet = Image.new("RGB", (width, _MARGIN + math.ceil(len(tiles) / columns) * _LINE), SURFACE)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(findfont(FontProperties(family=FONT, weight="bold")), _POINTS * PNG_DPI / 72)
    for place, query in enumerate(tiles):
        line, column = divmod(place, columns)
        left, top = _MARGIN + column * (_TILE + _GAP), _MARGIN + line * _LINE
        picture = open_picture(query.thumbnails[0], query.query_id)
        how = Image.Resampling.NEAREST if is_tiny(picture) else Image.Resampling.BICUBIC
        size = tuple(max(1, round(_TILE * side / max(picture.size))) for side in picture.size)
        tile = picture.convert("RGB").resize((size[0], size[1]), how)
        sheet.paste(tile, (left + (_TILE - tile.width) // 2, top + (_TILE - tile.height) // 2))
        text, color = _caption(report, query.label, query.status, query.is_right)
        draw.text((left + _TILE / 2, top + _TILE + 6), text, fill=color, font=font, anchor="ma")
    file = io.BytesIO()
    sheet.save(file, "PNG")
    alt = f"{count(len(tiles), 'public image')} asked about, each with its released label."
    return Picture("answers.png", alt, file.getvalue())


def _caption(report: JobReport, label: int, status: AnswerStatus, is_right: bool | None) -> tuple[str, str]:
    if status is not AnswerStatus.ANSWERED:
        return "no label", MUTED
    name = legible(report.class_name(label), most=12)
    if is_right is None:
        return name, INK
    return (f"✓ {name}", RIGHT) if is_right else (f"✗ {name}", WRONG)
