"""Checks of the real recipe before a rehearsal makes anything.

Each check returns a line about its result, or raises ValueError with the problem and its cure, or
`NotChecked` with the reason why it could not be seen here.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from nemo_rod.config import Config, section
from nemo_rod.corpus.adapters.hub_files import file_of
from nemo_rod.files import read_json
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.tasks import stage as tasks
from nemo_rod.run import hub
from nemo_rod.run.beforehand import lacking
from nemo_rod.run.hub import NotChecked
from nemo_rod.run.stages import Stages

# Tokens between the documents of pretraining, where they are not always the tokenizer's EOS: of
# Qwen and SmolLM2 by their model cards, of Nemotron models as the authors found.
_SEPARATORS = {r"(?i)qwen3|smollm2": "<|endoftext|>", r"(?i)nemotron": "</s>"}


def preflight(config: Config) -> dict[str, Callable[[], str]]:
    """Returns the checks of a recipe by name, in order."""
    checks = {"layout": lambda: check_layout(config), "recipe": lambda: check_recipe(config)}
    if config.model.hf is not None:
        checks["end of documents"] = lambda: check_separator(config)
        checks["class"] = lambda: check_class(config)
    checks["access"] = lambda: check_access(config)
    if tasks.wanted(config):
        checks["tasks"] = lambda: tasks.check(config)
    return checks


def check_layout(config: Config) -> str:
    """Checks that the layout divides the model.

    Raises:
        ValueError: it does not.
    """
    return str(make_plan(with_sizes(config)).layout["text"])


def with_sizes(config: Config) -> Config:
    """Returns a recipe whose layout and speed can be planned without the size of its text."""
    sized = copy.deepcopy(config)
    plan = section(sized, Plan)
    plan.adaptation_tokens = plan.adaptation_tokens or 1e9
    plan.replay_tokens = plan.replay_tokens or 1e9
    return sized


def check_recipe(config: Config) -> str:
    """Checks what `nemo-rod run` checks before its first stage: files, names, memory, disk.

    Raises:
        ValueError: something is wrong on every machine.
        NotChecked: something is lacking on this one.
    """
    of_the_hub = {sentence for sentence, _ in hub.refusals(hub.repos(config))}  # see check_access
    lacks = [
        lack for lack in lacking(Stages(config).all(), config) if lack.sentence not in of_the_hub
    ]
    if wrong := [lack.sentence for lack in lacks if lack.everywhere]:
        raise ValueError(" ".join(wrong))
    if lacks:
        raise NotChecked(" ".join(lack.sentence for lack in lacks))
    return "nothing is lacking here"


def check_separator(config: Config) -> str:
    """Checks that documents end with the token that ended them in pretraining.

    Raises:
        ValueError: another token ends documents.
        NotChecked: the tokenizer is not here, or that token is not known.
    """
    name = config.domain.tokenizer
    files = [file_of(name, file) for file in ("tokenizer.json", "tokenizer_config.json")]
    if files[0] is None or files[1] is None:
        raise NotChecked(f"tokenizer.json of {name} is not on this machine")
    added = read_json(files[0], "added_tokens")["added_tokens"]
    ids = {token["content"]: token["id"] for token in added if token["special"]}
    eos = read_json(files[1]).get("eos_token")
    eod = config.domain.eod
    eod = ids.get(eos["content"] if isinstance(eos, dict) else eos) if eod is None else eod
    ending = next((token for token, number in ids.items() if number == eod), "an ordinary token")
    known = next((t for p, t in _SEPARATORS.items() if re.search(p, str(config.model.hf))), None)
    if known not in ids:
        raise NotChecked(
            f"documents end with id {eod} ({ending}); the separator in the pretraining of "
            f"{config.model.hf} is not known here"
        )
    if eod != ids[known]:
        raise ValueError(
            f"Documents would end with id {eod} ({ending}), but in the pretraining of "
            f"{config.model.hf} they ended with id {ids[known]} ({known}): set "
            f"domain.eod={ids[known]}."
        )
    return f"id {eod}, {known}"


def check_class(config: Config) -> str:
    """Checks that transformers has the checkpoint's class, and that Megatron-Bridge names it.

    Raises:
        ValueError: an installed version has it not.
        NotChecked: the checkpoint's config.json is not on this machine.
    """
    file = file_of(str(config.model.hf), "config.json")
    if file is None:
        raise NotChecked(f"config.json of {config.model.hf} is not on this machine")
    import transformers

    described = read_json(file)
    name = str((described.get("architectures") or ["no class"])[0])
    if hasattr(transformers, name):
        bridge = importlib.util.find_spec("megatron.bridge")  # not imported: that takes long
        if bridge is not None:  # jobs may have another interpreter
            files = Path(str(bridge.origin)).parent.glob("models/**/*bridge.py")
            if not any(re.search(rf"\b{name}\b", file.read_text()) for file in files):
                raise ValueError(
                    f"{config.model.hf} is of the class {name}, which the installed "
                    "Megatron-Bridge does not convert: choose a model of another class."
                )
        return name
    if "auto_map" in described and config.model.trust_remote_code:
        return f"{name}, by the checkpoint's own code"
    cure = "install one that has it"
    if "auto_map" in described:
        cure += ", or set model.trust_remote_code=true to run the code that the checkpoint brings"
    raise ValueError(
        f"{config.model.hf} is of the class {name}, which the installed transformers "
        f"{transformers.__version__} lacks: {cure}."
    )


def check_access(config: Config) -> str:
    """Checks that the checkpoint and every dataset can be downloaded from the hub.

    Raises:
        ValueError: one does not exist, or is gated and the token or its terms are missing.
        NotChecked: the hub does not answer.
    """
    if not (remote := hub.repos(config)):
        return "everything is on this machine"
    refusals = [*hub.refusals(remote)]
    if wrong := [sentence for sentence, everywhere in refusals if everywhere]:
        raise ValueError(" ".join(wrong))
    if refusals:
        raise NotChecked(refusals[0][0])
    return f"{len({*remote.values()})} repositories of the hub can be read"
