"""A model card in every checkpoint of a run: its origin, its results and how to load it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.corpus.adapters.hub_files import name_and_revision
from nemo_rod.files import read_bytes, write_whole
from nemo_rod.lab.report.results import Results
from nemo_rod.lab.report.table import arms_table, markdown
from nemo_rod.lab.report.verdict import sentences
from nemo_rod.run.hub import is_here
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.selection.arm_names import parse_arm

_MARK = "<!-- written by nemo_rod with every report: remove this line to keep your changes -->"
_NOTHING = "a base that was trained from nothing"


def write_model_cards(config: Config, results: Results) -> list[Path]:
    """Writes `README.md` into the checkpoint of every arm of a report; returns the files.

    A card that a user has changed stays. Nothing is written where huggingface_hub is not installed.
    """
    run, written = RunFolder(Path(config.run_dir), config.recipe), list[Path]()
    with suppress(ImportError):
        from huggingface_hub import ModelCardData

        base, specs, sources = config.model.hf or _NOTHING, config.domain.specs, []
        is_local = is_here(base)
        datasets = {spec.name: spec.path for spec in specs if spec.path and not is_here(spec.path)}
        for spec in specs:
            origin = datasets.get(spec.name, f"{spec.kind}, files of the owner")
            blocks = results["sources"].get(spec.role, {}).get(spec.name, 0)
            sources.append(f"| {spec.name} | {spec.role} | {blocks:,} | {markdown(origin)} |")
        data = ModelCardData(
            base_model=[name_and_revision(base)[0]] if config.model.hf and not is_local else None,
            datasets=sorted({*datasets.values()}) or None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["continued-pretraining", "replay-on-demand", "nemo_rod"],
        )
        told = results["verdict"]
        verdict = " ".join([*sentences(told), told["advice"]]) if told else ""
        template = (Path(__file__).parent / "model_card.md").read_text(encoding="utf-8")
        arms = arms_table(results)
        for row in arms.rows:
            name, card = row["arm"], run.arm(row["arm"]) / "hf" / "README.md"
            changed = card.exists() and _MARK not in read_bytes(card).decode(errors="replace")
            if name == "base" or not card.parent.is_dir() or changed:
                continue
            # a run that was killed makes the same checkpoints, to the byte
            cells = [(c.title, c.cell(row)) for c in arms.columns[1:] if c.key != "wall_seconds"]
            text = template.format(
                data=data.to_yaml(),
                mark=_MARK,
                recipe=config.recipe,
                label=parse_arm(name).label,
                made=f"Made of {markdown(Path(base).name if is_local else base)} by nemo_rod "
                f"{sys.modules['nemo_rod'].__version__}: recipe `{config.recipe}`, arm `{name}`.",
                values="\n".join(
                    f"| {title} | {markdown(cell)} |" for title, cell in cells if cell
                ),
                verdict=verdict if name == "rod" else "",
                block_size=f"{config.domain.block_size:,}",
                sources="\n".join(sources),
            )
            write_whole(card, text.encode(), below=run.path)
            written.append(card)
    return written
