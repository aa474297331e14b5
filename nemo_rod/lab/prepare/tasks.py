"""Tasks that tokenise the files of a recipe's sources, each its own."""

import heapq
import json
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from nemo_rod.config import Domain
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.encode import Encoder
from nemo_rod.corpus.formats import ReadError
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import write_json
from nemo_rod.lab.prepare.file_tokens import FileTokens, folder_name, write_tokens
from nemo_rod.progress import Progress

_PROGRESS = "progress.json"  # bytes that a task has read


@dataclass(frozen=True)
class TextFile:
    """A file that a task tokenises."""

    spec: SourceSpec
    number: int  # its place in the source
    bytes: int
    folder: str  # name of the folder of its tokens


def tasks_of(domain: Domain, count: int, tokenizer: Tokenizer) -> list[list[TextFile]]:
    """Deals files out to tasks, the largest first, each to the task that has least to read.

    Sources of token ids, and of text that has no size, such as one that is made up, are left to
    `prepare`.
    """
    files = []
    for spec in domain.specs:
        inputs = open_inputs(spec, tokenizer)
        if all(item.size and item.in_place is None for item in inputs):
            for number, item in enumerate(inputs):
                name = folder_name(spec, number, item, tokenizer)
                files.append(TextFile(spec, number, item.size or 0, name))
    tasks: list[list[TextFile]] = [[] for _ in range(count)]
    loads = [(0, task) for task in range(count)]
    for file in sorted(files, key=lambda file: -file.bytes):
        load, task = heapq.heappop(loads)
        tasks[task].append(file)
        heapq.heappush(loads, (load + file.bytes, task))
    order = [spec.name for spec in domain.specs]
    for task_files in tasks:
        task_files.sort(key=lambda file: (order.index(file.spec.name), file.number))
    return tasks


def run_task(
    domain: Domain, count: int, folders: list[Path], trusted: bool, folder: Path, task: int
) -> int:
    """Tokenises the files of one task into its folder; those that are there are kept.

    Args:
        domain: the sources.
        count: number of all tasks.
        folders: those of all tasks, for the progress of all.
        trusted: whether the tokenizer's own code may run.
        folder: the task's.
        task: its number, from 0 on.

    Returns:
        The number of its files.

    Raises:
        ReadError: a file cannot be read; the message names it and the task.
    """
    tokenizer = load_tokenizer(domain.tokenizer, eod=domain.eod, trust_remote_code=trusted)
    tasks = tasks_of(domain, count, tokenizer)
    total = sum(file.bytes for files in tasks for file in files)
    bar = Progress(f"tokenising, {count} tasks", total, unit="bytes")
    done = 0

    def progress(consumed: int) -> None:
        write_json(folder / _PROGRESS, {"bytes": done + consumed})
        bar.step(sum(_bytes_read(other) for other in folders))

    with Encoder(tokenizer, domain.workers) as encoder:
        for file in tasks[task]:
            target = folder / f"{file.spec.role}-{file.spec.name}" / file.folder
            if not target.exists() and not _is_enough(file, target, folders):
                try:
                    write_tokens(file.spec, file.number, target, encoder, tokenizer, progress)
                except ReadError as error:
                    raise ReadError(f"task {task + 1} of {count}: {error}") from error
            done += file.bytes
            progress(0)
    return len(tasks[task])


def _is_enough(file: TextFile, target: Path, folders: list[Path]) -> bool:
    """Returns whether earlier files that tasks have finished reach a cap of the source."""
    spec, sums = file.spec, [0, 0, 0]
    caps = [cap or inf for cap in (spec.max_documents, spec.max_bytes, spec.max_tokens)]
    if min(caps) == inf:
        return False
    for folder in {target.parents[1], *folders}:
        for found in (folder / target.parent.name).glob("*.*"):
            number, _, key = found.name.partition(".")
            if number.isdigit() and int(number) < file.number and "." not in key:
                with suppress(OSError):  # being moved
                    made = FileTokens(found)
                    sizes = (len(made.sizes_D), int(made.sizes_D.sum()), made.num_tokens)
                    sums = [a + b for a, b in zip(sums, sizes, strict=True)]
    return any(done >= cap for done, cap in zip(sums, caps, strict=True))


def _bytes_read(folder: Path) -> int:
    with suppress(OSError, ValueError, KeyError):  # not begun, or being moved
        return int(json.loads((folder / _PROGRESS).read_text())["bytes"])
    return 0
