"""Which GPU architectures a library holds code for: its section .nv_fatbin, read without NVIDIA's tools.

The section is a row of containers (magic 0xBA55ED50, 16-bit version and header size, 64-bit size), each a row of
entries: 16-bit kind (1 is PTX, text that a driver compiles for any later card; 2 is machine code), 32-bit header size
at 4, 64-bit size at 8, and the architecture, 90 for sm_90, at 28. No document of NVIDIA's says so; `cuobjdump` prints
the same.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from pathlib import Path

PTX, MACHINE_CODE = 1, 2
_MAGIC = 0xBA55ED50


def architectures_of(library: Path) -> Counter[tuple[int, int]]:
    """How many entries of each (kind, architecture) a 64-bit ELF library has; none where it holds no code for GPUs."""
    found: Counter[tuple[int, int]] = Counter()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for at, end in _sections(data, b".nv_fatbin"):
            while at + 16 <= end:
                magic, _, header_size, size = struct.unpack_from("<IHHQ", data, at)
                if magic != _MAGIC:
                    at += 8  # between containers
                    continue
                entry, stop = at + header_size, at + header_size + size
                while entry + 32 <= stop:
                    kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
                    (architecture,) = struct.unpack_from("<I", data, entry + 28)
                    found[kind, architecture] += 1
                    entry += entry_header + entry_size
                at = stop
    return found


def _sections(data: mmap.mmap, name: bytes) -> list[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    texts = headers[names][4]
    found = []
    for text, _, _, _, offset, length in headers:
        end = data.find(b"\0", texts + text)
        if data[texts + text : end] == name:
            found.append((offset, offset + length))
    return found
