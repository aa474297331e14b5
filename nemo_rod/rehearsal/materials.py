"""What a rehearsal is made of: documents, tokenizers and a base checkpoint, in its own folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.corpus.documents import SourceSpec
from nemo_rod.files import read_json, write_json
from nemo_rod.recipe.prepared_blocks import source_specs
from nemo_rod.rehearsal.derive import Places, made_tokenizers
from nemo_rod.rehearsal.forms import SmallModel

DESCRIPTION, TABLE = "rehearsal.json", "table.json"


def describe(config: Config, folder: Path, model: SmallModel | None) -> None:
    """Writes what `make_materials` needs of the real recipe; also marks the folder as a rehearsal.

    Args:
        config: configuration of the recipe.
        folder: run folder of the rehearsal.
        model: its model in small; None for a base that the recipe trains.
    """
    write_json(
        folder / DESCRIPTION,
        {
            "recipe": config.recipe,
            "run_dir": str(Path(config.run_dir).absolute()),
            "model": model and dataclasses.asdict(model),
            "precision": config.model.precision,
            "sources": [dataclasses.asdict(spec) for spec in source_specs(config.domain)],
            "tasks": sorted({n for names in config.tasks.capabilities.values() for n in names}),
            "tokenizers": made_tokenizers(config, folder),
        },
    )


def make_materials(folder: Path) -> None:
    """Makes documents, tokenizers and the base checkpoint of a described rehearsal."""
    from nemo_rod.rehearsal.made_documents import write_sources
    from nemo_rod.rehearsal.small_checkpoint import write_checkpoint
    from nemo_rod.rehearsal.small_tasks import write_tasks
    from nemo_rod.rehearsal.special_tokens import special_tokens, write_tokenizer

    places = Places(folder.absolute())
    keys = ("model", "sources", "tasks", "tokenizers", "precision")
    described = read_json(folder / DESCRIPTION, *keys)
    shutil.rmtree(places.made, ignore_errors=True)
    write_sources([SourceSpec(**values) for values in described["sources"]], places.made)
    write_tasks(described["tasks"], places.tasks)
    if described["model"] is not None:
        small = SmallModel(**described["model"])
        tokens = special_tokens(described["tokenizers"][str(places.checkpoint)])
        never = [] if tokens.eos == tokens.separator else [tokens.small_ids()[tokens.eos]]
        precision = described["precision"]
        write_checkpoint(small, places.checkpoint, precision=precision, untrained=never)
    for target, name in described["tokenizers"].items():
        write_tokenizer(special_tokens(name), Path(target))


def is_rehearsal(folder: Path) -> bool:
    """Returns whether a folder is that of a rehearsal."""
    return any((folder / name).is_file() for name in (DESCRIPTION, TABLE))
