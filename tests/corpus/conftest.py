"""What tests of the corpus share."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """A process that dies loses nothing that it has written, and no test takes the power off."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
