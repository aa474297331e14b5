"""The first document of every dataset, read by the source's own reader and within a time limit.

A column, a configuration, a split or a filter that is wrong shows in the first record, long before
a corpus is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Thread

from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.sources import SourceSpec

RECORDS = 1_000  # of a dataset at most, if its filter drops them
# Errors of the network, of whichever library: classes by name, for none need be installed
_NETWORK = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "ClientConnectionError"}


def first_documents(specs: Sequence[SourceSpec], *, seconds: float) -> dict[str, str]:
    """Reads the first document of every source.

    Args:
        specs: sources of kind huggingface; they are streamed.
        seconds: time for all of them.

    Returns:
        Why there is none yet, by source, for those where that is no fault of the recipe.

    Raises:
        ValueError: if a source's reader refuses what it finds, or finds nothing.
    """
    unread = {spec.name: f"not read within {seconds:g} seconds" for spec in specs}
    refused: list[ValueError] = []

    def read() -> None:
        for spec in specs:
            try:
                why = _why_none(spec)
            except ValueError as error:
                refused.append(error)
                return
            unread.pop(spec.name)
            if why:
                unread[spec.name] = why

    # libraries try again for minutes where a network drops packets, and cannot be told to stop
    reader = Thread(target=read, name="first documents", daemon=True)
    reader.start()
    reader.join(seconds)
    if refused:
        raise refused[0]
    return dict(unread)


def _why_none(spec: SourceSpec) -> str | None:
    """Reads up to the first document; returns why none can be read, or None if one was."""
    try:
        for item in open_inputs(spec):
            for number, text in enumerate(item.records(None), start=1):
                if text is not None:
                    return None
                if number == RECORDS:
                    return f"its filter drops the first {RECORDS:,} records"
    except Exception as error:  # whatever the library's many loaders raise
        if any(_is_of_network(cause) for cause in _causes(error)):
            return f"the network failed ({_line(error)})"
        raise ValueError(f"source {spec.name}: {_line(error)}") from None
    raise ValueError(
        f"source {spec.name}: no record of {spec.path} is a document: correct its subset, split or "
        "filter"
    )


def _is_of_network(error: BaseException) -> bool:
    return any(kind.__name__ in _NETWORK for kind in type(error).__mro__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
