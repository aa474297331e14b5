"""Stand-ins for benchmark tasks: the same names in lm-eval, and questions that are made here.

They need no network. lm-eval itself asks them, of every arm; their answers mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_rod.lab.tasks.held_out_questions import task_definition
from nemo_rod.lab.toy.synthetic import synthetic_documents

_QUESTIONS, _CHOICES, _LETTERS = 8, 4, 16


def write_tasks(names: Sequence[str], folder: Path) -> None:
    """Writes a definition and questions for every name.

    Args:
        names: names of lm-eval's tasks or groups; each becomes a task.
        folder: folder of the definitions.
    """
    if names:
        folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        texts = synthetic_documents(number)
        lines = []
        for question in range(_QUESTIONS):
            text = next(texts)
            context, *choices = (
                text[place * _LETTERS : (place + 1) * _LETTERS] for place in range(1 + _CHOICES)
            )
            row = {"context": context, "choices": choices, "answer": question % _CHOICES}
            lines.append(json.dumps(row) + "\n")
        file = (folder / f"{name}.jsonl").absolute()
        file.write_text("".join(lines), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(task_definition(name, file), encoding="utf-8")
