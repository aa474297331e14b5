"""Replaced attributes of a host, and their restoration."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class Installed:
    """Handle that `install` returns; as a context manager, it uninstalls at the end.

    The replacements stay in place if the handle is discarded.
    """

    def __init__(self) -> None:
        # no context managers inside: they would undo the replacements with the handle's deletion
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Gives an attribute of the host another value until `uninstall`."""
        self._before.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def uninstall(self) -> None:
        """Restores every attribute's former value; a second call does nothing."""
        while self._before:
            target, name, value = self._before.pop()
            setattr(target, name, value)

    def __enter__(self) -> Self:
        """Returns the handle."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Uninstalls."""
        self.uninstall()
