"""A multipart/form-data body that is read from its files while it is sent, and can be sent again from the start."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, repr=False)
class Part:
    """One part of a form.

    Attributes:
        content: its bytes, or the file that holds them; a file is open only while it is sent.
        file_name: what the service shall call it; "" for a plain field.
    """

    field: str
    content: bytes | Path
    file_name: str = ""

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


class FormBody:
    """Parts as one body of known length.

    Args:
        parts: in the order in which they are sent.
    """

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._boundary = f"labeler-{secrets.token_hex(16)}"

    @property
    def headers(self) -> dict[str, str]:
        """Content-Type with the boundary, and Content-Length."""
        ending = len(self._end())
        length = sum(len(self._head(part)) + part.size + 2 for part in self._parts) + ending
        return {
            "Content-Type": f"multipart/form-data; boundary={self._boundary}",
            "Content-Length": str(length),
        }

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield self._head(part)
            if isinstance(part.content, bytes):
                yield part.content
            else:
                with part.content.open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        yield chunk
            yield b"\r\n"
        yield self._end()

    def _head(self, part: Part) -> bytes:
        disposition = f'Content-Disposition: form-data; name="{_quoted(part.field)}"'
        kind = ""
        if part.file_name:
            disposition += f'; filename="{_quoted(part.file_name)}"'
            kind = "\r\nContent-Type: application/octet-stream"
        return f"--{self._boundary}\r\n{disposition}{kind}\r\n\r\n".encode()

    def _end(self) -> bytes:
        return f"--{self._boundary}--\r\n".encode()


def _quoted(name: str) -> str:
    # A quoted string of HTTP, which is read back as it was; what browsers write for a quote, %22, may be a name's own.
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    return quoted.replace("\r", "%0D").replace("\n", "%0A")
