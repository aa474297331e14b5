"""A folder in which files are damaged, read, and put back; it sees what a reader changes."""

from __future__ import annotations

import os
from pathlib import Path


class Sandbox:
    """A folder with known content.

    Args:
        root: the folder; its content now is what `restore` brings back.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.content = {path: path.read_bytes() for path in self._files()}
        self._stamps = self._look()

    def files(self, *patterns: str) -> list[Path]:
        """Returns the files that match a glob below the folder, in order."""
        found = {path for pattern in patterns for path in self.root.glob(pattern)}
        return sorted(found & self.content.keys())

    def write(self, path: Path, content: bytes | None) -> None:
        """Changes a file, or removes it."""
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        self._stamps = self._look()

    def changed(self) -> list[Path]:
        """Returns the files that were changed, made or removed since the last `write`."""
        now = self._look()
        paths = self._stamps.keys() | now.keys()
        return sorted(path for path in paths if now.get(path) != self._stamps.get(path))

    def restore(self, *paths: Path) -> None:
        """Brings files back; removes what was not there."""
        for path in paths:
            if path in self.content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.content[path])
            else:
                path.unlink(missing_ok=True)
        self._stamps = self._look()

    def _files(self) -> list[Path]:
        return [Path(top, name) for top, _, names in os.walk(self.root) for name in names]

    def _look(self) -> dict[Path, tuple[int, int]]:
        states = [(path, path.stat()) for path in self._files()]
        return {path: (state.st_mtime_ns, state.st_size) for path, state in states}
