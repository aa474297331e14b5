"""The encoder of `prepare`, which takes the tokens of a file from a task that has made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.documents import Documents, mark_repeated
from nemo_rod.corpus.encode import Batch, Encoded, Encoder, batches
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.files import remove
from nemo_rod.lab.prepare.file_tokens import FileTokens, folder_name

PARTS = "text_parts"  # folder of all tasks, beside that of the blocks


class JoiningEncoder(Encoder):
    """Reads a source file by file: what tasks have made of one, or else the file itself."""

    _made_below: Path | None = None

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._made_below is not None and error == (None, None, None):  # the blocks are there
            for tokens in list(self._made_below.rglob("tokens.bin")):  # files first
                with suppress(ValueError, OSError):  # behind a link, which is not followed
                    remove(tokens.parent, below=self._made_below.parent)

    def read(self, documents: Documents, folder: Path) -> Iterator[tuple[Batch, Encoded]]:
        """Yields the documents of a source in batches, with their tokens, in order."""
        spec, state = documents.spec, documents.state()
        sizes = [item.size or 0 for item in documents.inputs]
        for number in range(state["input"], len(sizes)):
            made = None
            if state["position"] is None:
                made = self._find_tokens(documents, number, folder)
            if made is not None:
                first, count = state["seen"], len(made.sizes_D)
                dropped_D = np.zeros(count, dtype=bool)  # documents that repeat an earlier one
                if documents.duplicates is not None:
                    marks = documents.duplicates[first // 8 : (first + count + 7) // 8]
                    dropped_D = np.unpackbits(marks)[first % 8 :][:count].astype(bool)
                taken = state["taken"] + int((~dropped_D).sum())
                total = state["bytes"] + int(made.sizes_D[~dropped_D].sum())
                if taken < (spec.max_documents or np.inf) and total < (spec.max_bytes or np.inf):
                    for batch, tokens in made.batches(number, dropped_D):
                        batch.consumed = sum(sizes[:number])
                        yield batch, tokens
                    state = {"input": number + 1, "position": None, "seen": first + count}
                    state |= {"taken": taken, "bytes": total}
                    nothing = np.empty(0, np.int32), np.empty(0, np.int64)
                    yield Batch(state=state, consumed=sum(sizes[: number + 1])), nothing
                    continue
            alone = documents.again(state, number)
            yield from self.encode(batches(alone))
            state = alone.state()
            if state["input"] == number:  # a cap ends the source here
                return

    def find_duplicates(
        self, spec: SourceSpec, folder: Path, progress: Callable[[int], None]
    ) -> NDArray[np.uint8]:
        """Marks exact duplicates: by the digests of tasks, if those have made all files."""
        documents = Documents(spec, tokenizer=self._tokenizer)
        made = [self._find_tokens(documents, n, folder) for n in range(len(documents.inputs))]
        if any(part is None or len(part.digests) < len(part.sizes_D) for part in made):
            return super().find_duplicates(spec, folder, progress)
        digests = (row.tobytes() for part in made if part is not None for row in part.digests)
        return mark_repeated(digests, folder)

    def _find_tokens(self, documents: Documents, number: int, folder: Path) -> FileTokens | None:
        """Returns what a task has made of a file; None if none has."""
        name = folder_name(documents.spec, number, documents.inputs[number], self._tokenizer)
        self._made_below = folder.absolute().parents[2] / PARTS
        for depth in ("*", "*/*"):  # a task's own folder, or below the stage that runs all tasks
            for found in self._made_below.glob(f"{depth}/{folder.name}/{name}"):
                return FileTokens(found)
        return None
