"""Empties a CUDA library's code for all GPUs but one, so that it packs small: LIBRARY 90.

Each entry of the section `.nv_fatbin` says which architecture its code is for; the code of the
others becomes zeros, at the same place. `cuobjdump` documents the containers' layout.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
MACHINE_CODE = 2  # kind of an entry; 1 is PTX, which the driver would compile


def section(data: mmap.mmap) -> tuple[int, int]:
    """Where the section begins and ends, from the headers of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit little-endian ELF file: give a shared library")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        begin = strings + name
        if data[begin : data.find(b"\0", begin)] == SECTION:
            return offset, offset + length
    raise ValueError(f"the library has no section {SECTION.decode()}: it holds no code for GPUs")


def keep(path: Path, architecture: int) -> tuple[int, int]:
    """Empties what is for other architectures; returns the bytes of code kept and emptied."""
    kept = emptied = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at, end = section(data)
        while at + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:  # padding between containers
                at += 8
                continue
            entry, stop = at + header, at + header + length
            while entry < stop:
                kind, _, head, size = struct.unpack_from("<HHIQ", data, entry)
                (number,) = struct.unpack_from("<I", data, entry + 28)
                if kind == MACHINE_CODE and number == architecture:
                    kept += size
                else:
                    data[entry + head : entry + head + size] = bytes(size)
                    emptied += size
                entry += head + size
            at = stop + -stop % 8
    if not kept:
        raise ValueError(f"{path} has no code for sm_{architecture}: name an architecture it has")
    return kept, emptied


if __name__ == "__main__":
    try:
        kept, emptied = keep(Path(sys.argv[1]), int(sys.argv[2]))
    except ValueError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    print(f"{sys.argv[1]}: kept {kept >> 20} MiB of code, emptied {emptied >> 20} MiB")
