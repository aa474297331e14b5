"""Names of a host that were given another value, and how to give them back."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class Installed:
    """What `install` returns; as a context manager it uninstalls at the end. Need not be kept."""

    def __init__(self) -> None:
        # no context managers inside: they would undo their work when the handle is thrown away
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Gives an attribute of the host another value until `uninstall`."""
        self._before.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def uninstall(self) -> None:
        """Gives every attribute its former value back; a second call does nothing."""
        while self._before:
            target, name, value = self._before.pop()
            setattr(target, name, value)

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Uninstall."""
        self.uninstall()
