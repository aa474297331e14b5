"""What a rehearsal is made of: documents, tokenizers and a base checkpoint, in its own folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from nemo_rod.config import Config, section
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.rehearsal.derive import Places, made_tokenizers
from nemo_rod.lab.rehearsal.forms import SmallModel
from nemo_rod.lab.rehearsal.special_tokens import SpecialTokens, special_tokens, write_tokenizer
from nemo_rod.lab.tasks.section import Tasks

DESCRIPTION, TABLE = "rehearsal.json", "table.json"
# What only a rehearsal writes into its files: a file of that name may be anybody's
_KEYS = {
    DESCRIPTION: {"recipe", "run_dir", "sources", "tokenizers"},
    TABLE: {"recipe", "rows", "plan"},
}


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
            "sources": [dataclasses.asdict(spec) for spec in config.domain.specs],
            "tasks": sorted(
                {n for names in section(config, Tasks).capabilities.values() for n in names}
            ),
            # what was found here, for a node may have another cache
            "tokenizers": {
                target: dataclasses.asdict(special_tokens(name))
                for target, name in made_tokenizers(config, folder).items()
            },
        },
    )


def make_materials(folder: Path) -> None:
    """Makes documents, tokenizers and the base checkpoint of a described rehearsal."""
    from nemo_rod.lab.rehearsal.made_documents import write_sources
    from nemo_rod.lab.rehearsal.small_checkpoint import write_checkpoint
    from nemo_rod.lab.rehearsal.small_tasks import write_tasks

    places = Places(folder.absolute())
    keys = ("model", "sources", "tasks", "tokenizers", "precision")
    described = read_json(folder / DESCRIPTION, *keys)
    tokenizers = {name: SpecialTokens(**found) for name, found in described["tokenizers"].items()}
    shutil.rmtree(places.made, ignore_errors=True)
    write_sources([SourceSpec(**values) for values in described["sources"]], places.made)
    write_tasks(described["tasks"], places.tasks)
    if described["model"] is not None:
        small = SmallModel(**described["model"])
        tokens = tokenizers[str(places.checkpoint)]
        is_trained = tokens.separator in (None, tokens.eos)
        never = [] if is_trained else [tokens.small_ids()[tokens.eos]]
        precision = described["precision"]
        write_checkpoint(small, places.checkpoint, precision=precision, untrained=never)
    for target, tokens in tokenizers.items():
        write_tokenizer(tokens, Path(target))


def is_rehearsal(folder: Path) -> bool:
    """Returns whether a folder is that of a rehearsal: one of its files has a rehearsal's content.

    One that was stopped while it rehearsed what it uses holds nothing but those rehearsals.
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
    if not file.is_file():
        return False
    try:
        return keys <= read_json(file).keys()
    except (ValueError, OSError):  # whoever wrote it
        return False
