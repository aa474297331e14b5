"""Materials of a rehearsal in its own folder: documents, tokenizers, base checkpoint, tasks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from nemo_rod.config import Config, section
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.rehearsal.derive import Places
from nemo_rod.lab.rehearsal.forms import SmallModel
from nemo_rod.lab.rehearsal.special_tokens import SpecialTokens, special_tokens, write_tokenizer
from nemo_rod.lab.tasks.section import Tasks

DESCRIPTION, TABLE = "rehearsal.json", "table.json"
# Keys that identify these files as a rehearsal's; other programs may use the same file names
_KEYS = {
    DESCRIPTION: {"recipe", "run_dir", "sources", "tokenizers"},
    TABLE: {"recipe", "rows", "plan"},
}
_QUESTIONS, _CHOICES, _LETTERS = 8, 4, 16  # of a made task; letters of a text


def describe(config: Config, folder: Path, model: SmallModel | None) -> None:
    """Writes the input of `make_materials`; it also marks the folder as a rehearsal."""
    places, tokenizers = Places(folder.absolute()), {}
    if config.model.hf is not None:
        tokenizers[str(places.checkpoint)] = config.model.hf
    if config.domain.tokenizer not in ("byte", config.model.hf):
        tokenizers[str(places.tokenizer(config.domain.tokenizer))] = config.domain.tokenizer
    tasks = section(config, Tasks).capabilities.values()
    description = {
        "recipe": config.recipe,
        "run_dir": str(Path(config.run_dir).absolute()),
        "model": model and dataclasses.asdict(model),
        "precision": config.model.precision,
        "sources": [dataclasses.asdict(spec) for spec in config.domain.specs],
        "tasks": sorted({name for names in tasks for name in names}),
        # read here, because a node may have another cache
        "tokenizers": {
            target: dataclasses.asdict(special_tokens(name)) for target, name in tokenizers.items()
        },
    }
    write_json(folder / DESCRIPTION, description)


def make_materials(folder: Path) -> None:
    """Makes documents, tokenizers, tasks and the base checkpoint of a described rehearsal."""
    from nemo_rod.corpus.adapters.synthetic import synthetic_documents
    from nemo_rod.lab.rehearsal.made_documents import write_sources
    from nemo_rod.lab.rehearsal.small_checkpoint import write_checkpoint
    from nemo_rod.lab.tasks.held_out_questions import write_task

    places = Places(folder.absolute())
    keys = ("model", "sources", "tasks", "tokenizers", "precision")
    described = read_json(folder / DESCRIPTION, *keys)
    tokenizers = {name: SpecialTokens(**keys) for name, keys in described["tokenizers"].items()}
    shutil.rmtree(places.made, ignore_errors=True)
    write_sources([SourceSpec(**values) for values in described["sources"]], places.made)
    for number, name in enumerate(described["tasks"]):  # an lm-eval task or group
        rows = []  # made-up questions, whose answers mean nothing
        for question, text in zip(range(_QUESTIONS), synthetic_documents(number), strict=False):
            context, *choices = (
                text[place * _LETTERS : (place + 1) * _LETTERS] for place in range(1 + _CHOICES)
            )
            rows.append({"context": context, "choices": choices, "answer": question % _CHOICES})
        write_task(name, rows, places.tasks)
    if described["model"] is not None:
        tokens = tokenizers[str(places.checkpoint)]
        is_trained = tokens.separator in (None, tokens.eos)
        write_checkpoint(
            SmallModel(**described["model"]),
            places.checkpoint,
            precision=described["precision"],
            untrained=[] if is_trained else [tokens.small_ids()[tokens.eos]],
        )
    for target, tokens in tokenizers.items():
        write_tokenizer(tokens, Path(target))


def is_rehearsal(folder: Path) -> bool:
    """Returns whether a folder belongs to a rehearsal: one of its files has a rehearsal's content.

    A rehearsal that was stopped during those that it uses holds nothing but these.
    """
    if any(_has_keys(folder / name, keys) for name, keys in _KEYS.items()):
        return True
    others = [*folder.glob("others/*")]
    return (
        bool(others)
        and [*folder.iterdir()] == [folder / "others"]
        and all(_has_keys(other / DESCRIPTION, _KEYS[DESCRIPTION]) for other in others)
    )


def _has_keys(file: Path, keys: set[str]) -> bool:
    try:
        return file.is_file() and keys <= read_json(file).keys()
    except (ValueError, OSError):  # another program's file
        return False
