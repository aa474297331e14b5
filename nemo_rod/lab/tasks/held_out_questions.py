"""Questions from held-out blocks: which of four texts continues the context?

A question shows the first half of a held-out block and four short texts: its continuation, and the
texts at the same position in three other held-out blocks of that source. Every replay source
becomes one lm-eval task, a yaml beside the questions, and one capability. It measures a model's
knowledge of a source on blocks that it was not trained on, without any download.

    <folder>/held_out_<source>.yaml
    <folder>/held_out_<source>.jsonl     {"context": ..., "choices": [...], "answer": ...}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.corpus import BlockStore
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import write_whole
from nemo_rod.roles import SourceRow

NUM_CHOICES = 4
PREFIX = "held_out_"
# A choice is 1/16 of a block long. Short ones separate models: on the toy, the base is right in
# three of four and no replay in three of five; over a quarter of a block, in a half and two of
# five, with fewer sources that separate the two. Wrong choices made by exchanging letters of the
# right text are too easy: no replay, too, is right in nine of ten.
_CHOICE_SHARE = 16
_YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""


def write_held_out_tasks(
    blocks: Path, folder: Path, tokenizer: Tokenizer, *, num_questions: int
) -> dict[str, list[str]]:
    """Writes a task for every replay source, of at most `num_questions` of its held-out blocks.

    Returns:
        Names of the tasks by capability, which is the source's name.

    Raises:
        ValueError: the tokenizer differs, or a source has too few held-out blocks.
    """
    store = BlockStore(blocks, split="holdout")
    store.check_tokenizer(tokenizer)
    capabilities = {}
    for source in store.sources:
        if source.role != "replay":
            continue
        if source.count < NUM_CHOICES:
            raise ValueError(
                f"Source {source.name} of {blocks} has {source.count} held-out blocks, expected "
                f"{NUM_CHOICES} or more to make questions of: choose another tasks=... group, or "
                "raise domain.holdout_floor."
            )
        name = PREFIX + source.name
        write_task(name, questions(store, source, tokenizer, num_questions), folder)
        capabilities[source.name] = [name]
    return capabilities


def write_task(name: str, rows: Iterable[dict[str, Any]], folder: Path) -> None:
    """Writes the questions of a multiple-choice task, and lm-eval's definition of it."""
    file = (folder / f"{name}.jsonl").absolute()
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    definition = _YAML.format(name=name, file=json.dumps(str(file)))
    write_whole(folder / f"{name}.yaml", definition.encode())


def questions(
    store: BlockStore, source: SourceRow, tokenizer: Tokenizer, num_questions: int
) -> Iterator[dict[str, Any]]:
    """Yields the questions of a source, equal for every model, in the order of its held-out blocks.

    Blocks without three other blocks of different continuations are skipped.
    """
    half = store.block_size // 2
    length = max(store.block_size // _CHOICE_SHARE, 1)
    ids = np.arange(source.start, source.start + source.count)
    for number in range(min(num_questions, source.count)):
        tokens_S = store.checked_tokens([ids[number]])[0]
        right = tokenizer.decode(tokens_S[half : half + length])
        wrong: list[str] = []
        key = f"{source.name}/{number}".encode()
        seed = hashlib.blake2b(key, digest_size=8, person=b"rod-tasks-v1").digest()
        order = np.random.default_rng(int.from_bytes(seed)).permutation(source.count)
        for other in order:  # fixed for each question
            continued = store.checked_tokens([ids[other]])[0][half : half + length]
            text = tokenizer.decode(continued)
            if other != number and text != right and text not in wrong:
                wrong.append(text)
            if len(wrong) == NUM_CHOICES - 1:
                break
        else:
            continue
        answer = number % NUM_CHOICES
        choices = [*wrong[:answer], right, *wrong[answer:]]
        context = tokenizer.decode(tokens_S[:half])
        yield {"context": context, "choices": choices, "answer": answer}
