"""Leaves a folder's files out of a wheel: WHEEL FOLDER/."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def leave_out(wheel: Path, folder: str) -> int:
    """Rewrites a wheel without the files below a folder; returns how many there were.

    Raises:
        ValueError: the wheel has no such file.
    """
    making = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(making, "w", zipfile.ZIP_DEFLATED) as new:
        left_out = [name for name in old.namelist() if name.startswith(folder)]
        for name in old.namelist():
            if name in left_out:
                continue
            content = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                rows = content.decode().splitlines(keepends=True)
                content = "".join(row for row in rows if not row.startswith(folder)).encode()
            new.writestr(old.getinfo(name), content)
    if not left_out:
        making.unlink()
        raise ValueError(f"{wheel} has no file below {folder}: name a folder that it has")
    making.replace(wheel)
    return len(left_out)


if __name__ == "__main__":
    try:
        count = leave_out(Path(sys.argv[1]), sys.argv[2])
    except ValueError as error:
        sys.exit(str(error))
    print(f"{sys.argv[1]}: left out {count} files")
