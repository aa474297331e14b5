"""`nemo-rod merge`: the merged arms of a recipe, or two given checkpoints."""

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

from nemo_rod.alternatives.residual import other_run
from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.text import say
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.merging import merge_checkpoints
from nemo_rod.lab.text import TRUST
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.handover import HandOver, Inputs, Stage
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST, merged_from
from nemo_rod.selection.arm_names import RESIDUAL, parse_arm

MARKS = {"lambda"}  # keys that identify the form with two folders

_USAGE = """\
nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT [origin=FOLDER] [trust_remote_code=true]
       nemo-rod merge recipe=NAME [arm=merge_WEIGHT] [KEY=VALUE ...]"""
_DESCRIPTION = """\
Interpolates linearly between the weights of two checkpoints.

With lambda=, or when the first argument is a folder, between any two Hugging Face checkpoints.
Otherwise the merged arms of a recipe, in Hydra's
grammar: `nemo-rod merge recipe=NAME --cfg job` shows all keys of that form."""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod merge` with two folders."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument("base", metavar="BASE", help="checkpoint that lambda=0 gives")
    parser.add_argument("adapted", metavar="ADAPTED", help="checkpoint that lambda=1 gives")
    parser.add_argument("out", metavar="OUT", help="folder of the merged checkpoint")
    parser.add_keys(
        Key("lambda", "WEIGHT", "weight of ADAPTED, from 0 to 1", required=True, read=float,
            bound="in [0, 1]"),
        Key("origin", "FOLDER", "checkpoint that ADAPTED was trained from, where that is not BASE: "
            "what training has changed is added to BASE, such as an instruct model"),
        dataclasses.replace(TRUST, help="copies the code that lies beside BASE, for others to run"),
    )  # fmt: skip
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Merges the two checkpoints."""
    weight, code = vars(options)["lambda"], bool(options.trust_remote_code)
    folders = (options.base, options.adapted, options.out)
    merge_checkpoints(*folders, weight, origin=options.origin, code=code)
    print(f"{options.out}: {1 - weight:g} of {options.base} and {weight:g} of {options.adapted}")
    if (left := sorted(file.name for file in Path(options.base).glob("*.py"))) and not code:
        say(
            f"nemo-rod: {options.out} has no code of {options.base} ({', '.join(left)}): if a "
            "program needs it, read it and merge again with trust_remote_code=true."
        )


def merge_stages(stages: Stages) -> list[Stage]:
    """Returns a stage for each merged arm: only `arm` if it is set, else all of the recipe."""
    config = stages.config
    names = [config.arm] if config.arm else dict.fromkeys(config.arms)
    return [_stage(stages, name) for name in names if stages.jobs.settings(name).kind == "merged"]


def _stage(stages: Stages, name: str) -> Stage:
    """Returns the stage of (1 - lambda) base + lambda specialist (paper, appendix B.4).

    Instead of the specialist, a name may have another arm, such as fixed_8_merge_0.8; a residual
    has an arm of another run, of which it takes what was learned there.
    """
    results, weight, residual = stages.results, parse_arm(name).value, RESIDUAL.fullmatch(name)
    arm = (residual[1] or SPECIALIST) if residual else merged_from(name)
    other = other_run(stages) if residual else None
    trainer = other or results

    def inputs() -> Inputs:
        made = {"base": results.weights("base")}
        if other is None:
            return made | {"specialist": results.weights(arm), "lambda": weight}
        ours, theirs = (run.block_counts()["digest"] for run in (results, other))
        if ours != theirs:
            raise ValueError(
                f"{other.path} was trained on other blocks ({theirs}) than those of this run "
                f"({ours}): prepare the same ones, with the same tokenizer."
            )
        origin, trained = map(other.weights, ("base", arm))
        return made | {"blocks": ours, "origin": origin, "trained": trained}

    def make(folder: Path) -> dict[str, Any]:
        if not (folder / "hf").exists():  # whole, if an interrupted attempt left it
            folders = (results.checkpoint("base"), trainer.checkpoint(arm), folder / "hf")
            origin = other.checkpoint("base") if other else None
            code = stages.config.model.trust_remote_code
            merge_checkpoints(*folders, weight, origin=origin, code=code)
        description = read_json(trainer.arm(arm) / "arm.json", "steps")
        own = {} if other else {"lambda": weight, "wall_seconds": 0.0}
        write_json(folder / "arm.json", {**description, "name": name, "kind": "merged", **own})
        return {"weights": checkpoint_digest(folder / "hf")}

    title = f"merge base and {'specialist' if arm == SPECIALIST else arm} at {weight:g}"
    return HandOver(name, results.arm(name), inputs, make).stage(
        f"merge arm={name}",
        title if other is None else f"add what {arm} of {other.path} has learned",
        needs=("base", *(() if other else (arm,))),
        runs_model=False,
        extra="eval",
    )
