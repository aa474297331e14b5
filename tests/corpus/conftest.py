"""What tests of the corpus share."""

import os

import pytest
from corpus_cases import make_corpus, run


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A corpus that no test changes, and its store."""
    folder = tmp_path_factory.mktemp("shared")
    corpus = make_corpus(folder / "data")
    run(folder / "blocks", corpus)
    return corpus, folder / "blocks"


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """A process that dies loses nothing that it has written, and no test takes the power off."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
