"""Replaced attributes of a host, and their restoration."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Installed(ExitStack):
    """Handle that `install` returns; as a context manager, it uninstalls at the end.

    The replacements stay in place if the handle is discarded.
    """

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Gives an attribute of the host another value until `uninstall`."""
        # no context manager inside: it would undo the replacement with the handle's deletion
        self.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    def uninstall(self) -> None:
        """Restores every attribute's former value; a second call does nothing."""
        self.close()
