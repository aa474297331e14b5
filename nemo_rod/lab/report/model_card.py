"""A model card in every checkpoint of a run: its origin, its results and how to load it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.corpus.adapters.hub_files import name_and_revision
from nemo_rod.files import read_bytes, read_json, write_whole
from nemo_rod.lab.report.results import Results
from nemo_rod.lab.report.table import markdown, row_of
from nemo_rod.lab.report.verdict import sentences
from nemo_rod.run.hub import is_here
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.selection.arm_names import parse_arm

_MARK = "<!-- written by nemo_rod with every report: remove this line to keep your changes -->"
_NOTHING = "a base that was trained from nothing"
_TEXT = """---
{data}
---

{mark}

# {recipe}, {label}

{made}

| | |
|---|---|
| loss on new text, nats a token | {adapt_loss} |
| forgetting F_val, nats a token | {forgetting} |
| replay share | {share} |
| trained tokens | {tokens} |
| cost in all, of plain runs | {cost} |
| seed | {seed} |

Losses are of held-out blocks of {block_size} tokens; F_val is the rise of the replay sources above
the base, an improvement counting as zero. Both are means weighted by the blocks of the sources.

{verdict}

## Data

| source | role | blocks | from |
|---|---|---|---|
{sources}

The licence of the model is that of its base and of these sources: state it here before you publish.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "..."  # where the card lies
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
```
"""


def write_model_cards(config: Config, results: Results) -> list[Path]:
    """Writes `README.md` into the checkpoint of every arm of a report; returns the files.

    A card that a user has changed stays. Nothing is written where huggingface_hub is not installed.
    """
    run, written = RunFolder(Path(config.run_dir), config.recipe), list[Path]()

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    with suppress(ImportError):
        from huggingface_hub import ModelCardData

        base, specs, sources = config.model.hf or _NOTHING, config.domain.specs, []
        is_local = is_here(base)
        datasets = {spec.name: spec.path for spec in specs if spec.path and not is_here(spec.path)}
        for spec in specs:
            manifest = run.blocks / spec.role / spec.name / "manifest.json"
            count = read_json(manifest).get("count") if manifest.exists() else None
            origin = datasets.get(spec.name, f"{spec.kind}, files of the owner")
            cells = (spec.name, spec.role, number(count, ","), markdown(origin))
            sources.append(f"| {' | '.join(cells)} |")
        data = ModelCardData(
            base_model=[name_and_revision(base)[0]] if config.model.hf and not is_local else None,
            datasets=sorted({*datasets.values()}) or None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["continued-pretraining", "replay-on-demand", "nemo_rod"],
        )
        told = results["verdict"]
        verdict = " ".join([*sentences(told), told["advice"]]) if told else ""
        for name in results["arms"]:
            card = run.arm(name) / "hf" / "README.md"
            changed = card.exists() and _MARK not in read_bytes(card).decode(errors="replace")
            if name == "base" or not card.parent.is_dir() or changed:
                continue
            arm = row_of(results, name)
            text = _TEXT.format(
                data=data.to_yaml(),
                mark=_MARK,
                recipe=config.recipe,
                label=parse_arm(name).label,
                made=f"Made of {markdown(Path(base).name if is_local else base)} by nemo_rod "
                f"{sys.modules['nemo_rod'].__version__}: recipe `{config.recipe}`, arm `{name}`.",
                adapt_loss=number(arm["adapt_loss"], ".4f"),
                forgetting=number(arm["val_forgetting"], ".4f"),
                share=number(arm["replay_share"], ".1%"),
                tokens=number(arm["trained_tokens"], ","),
                cost=number(arm["runs_in_all"], ".2f"),
                verdict=verdict if name == "rod" else "",
                seed=number(arm["seed"], ""),
                block_size=f"{config.domain.block_size:,}",
                sources="\n".join(sources),
            )
            write_whole(card, text.encode(), below=run.path)
            written.append(card)
    return written
