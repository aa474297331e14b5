"""Checks of the real recipe before a rehearsal makes anything: names, ids, access.

Each check returns a line about its result, or raises ValueError with the problem and its cure. A
check that needs the network where there is none raises `NotChecked`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from nemo_rod.config import Config
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.files import read_json
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.plan.memory import check_memory
from nemo_rod.lab.rehearsal.special_tokens import SpecialTokens, published_file, special_tokens
from nemo_rod.lab.tasks import stage as tasks
from nemo_rod.run import hub
from nemo_rod.run.hub import NotChecked

RECORDS = 1_000  # of a dataset at most, if its filter drops them
_DOCUMENTS_SECONDS = 300.0  # for the first documents of all sources
# Network errors of all libraries: classes by name, because none needs to be installed
_NETWORK = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "ClientConnectionError"}


def preflight(config: Config) -> dict[str, Callable[[], str]]:
    """Returns the checks of a recipe by name, in order."""
    checks: dict[str, Callable[[], str]] = {"layout": lambda: check_layout(config)}
    if config.model.hf is not None:
        checks |= {
            "tokenizer": lambda: check_tokenizer(config),
            "end of documents": lambda: check_separator(config),
            "class": lambda: check_class(config),
        }
    checks["access"] = lambda: check_access(config)
    if any(source.get("kind") == "huggingface" for source in config.domain.sources.values()):
        checks["documents"] = lambda: check_documents(config)
    if tasks.wanted(config):
        checks["tasks"] = lambda: tasks.check(config)
    return checks


def check_layout(config: Config) -> str:
    """Checks that the layout divides the model, and fits its processors.

    Raises:
        ValueError: the layout does not divide the model, or does not fit.
    """
    plan = make_plan(config)
    check_memory(config, plan.memory)
    return str(plan.layout["text"])


def check_tokenizer(config: Config) -> str:
    """Checks that the ids of the blocks' tokenizer have the same meaning in the model.

    Raises:
        ValueError: the tokenizer belongs to another family.
    """
    name, model = config.domain.tokenizer, str(config.model.hf)
    if name == model:
        return f"{name}, the model's own"
    tokens, model_tokens = special_tokens(name), special_tokens(model)
    theirs, own, origin = tokens.ids, model_tokens.ids, _origin(tokens, model_tokens)
    shared = theirs.keys() & own.keys()
    if any(theirs[token] != own[token] for token in shared) or not shared:
        token = min(shared, key=lambda token: theirs[token], default=min(theirs))
        raise ValueError(
            f"domain.tokenizer={name} is the tokenizer of another model than model.hf={model} "
            f"({token} is id {theirs[token]}, the model has it at {own.get(token)}{origin}): its "
            "ids mean other text to the model; set domain.tokenizer=${model.hf}."
        )
    renamed = [token for token in theirs if token not in own]
    if renamed and config.model.special_tokens == "same":
        raise ValueError(
            f"domain.tokenizer={name} has special tokens that are not those of model.hf={model} "
            f"({', '.join(renamed[:3])}): set model.special_tokens=renamed if only their names "
            "differ, or domain.tokenizer=${model.hf}."
        )
    return f"{name}, with the ids of {model}{origin}"


def check_separator(config: Config) -> str:
    """Checks that documents end with the token that ended them in pretraining.

    Raises:
        ValueError: another token ends documents.
        NotChecked: that token is not known.
    """
    tokens = special_tokens(config.domain.tokenizer)
    expected, origin = tokens.separator, _origin(tokens)
    eod = tokens.ids[tokens.eos] if config.domain.eod is None else config.domain.eod
    if expected is None:
        raise NotChecked(
            f"documents end with id {eod} ({tokens.name_of(eod)}); the separator in the "
            f"pretraining of {config.model.hf} is not known here"
        )
    if eod == tokens.ids[expected]:
        return f"id {eod}, {expected}{origin}"
    raise ValueError(
        f"Documents would end with id {eod} ({tokens.name_of(eod)}), but in the pretraining of "
        f"{config.model.hf} they ended with id {tokens.ids[expected]} ({expected}{origin}): set "
        f"domain.eod={tokens.ids[expected]}."
    )


def _origin(*tokenizers: SpecialTokens) -> str:
    return "" if all(tokens.was_read for tokens in tokenizers) else ", as known here, not read"


def check_class(config: Config) -> str:
    """Checks that transformers has the checkpoint's class, and that Megatron-Bridge names it.

    Raises:
        ValueError: an installed version has it not.
        NotChecked: the checkpoint's config.json is not on this machine.
    """
    described = published_config(str(config.model.hf))
    if described is None:
        raise NotChecked(f"config.json of {config.model.hf} is not on this machine")
    import transformers

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


def published_config(name: str) -> dict[str, Any] | None:
    """Returns a checkpoint's config.json from its folder or the hub's cache; None if not here."""
    file = published_file(name, "config.json")
    return None if file is None else read_json(file)


def check_access(config: Config) -> str:
    """Checks that the checkpoint and every dataset can be downloaded from the hub.

    Raises:
        ValueError: one does not exist, or is gated and the token or its terms are missing.
        NotChecked: the hub cannot be reached.
    """
    remote = sorted({*hub.named(config).values()}, key=str)
    if not remote:
        return "everything is on this machine"
    for repository in remote:
        hub.check_access(repository)
    return f"{len(remote)} repositories of the hub can be read"


def check_documents(config: Config) -> str:
    """Checks that every Hugging Face dataset has a first document, as the source's reader reads it.

    A wrong column, configuration, split or filter shows in the first record, long before a corpus
    is downloaded.

    Raises:
        ValueError: a dataset has no first document; the message is the reader's.
        NotChecked: a dataset could not be read here.
    """
    specs = [spec for spec in config.domain.specs if spec.kind == "huggingface"]
    unread: dict[str, str] = {}
    no_answer = ""  # the reason, once the hub did not answer: it is not asked again
    for spec in specs:
        if hub.is_here(str(spec.path)):
            continue
        try:
            if not no_answer:
                hub.check_access(hub.Repository(str(spec.path), spec.revision, "dataset"))
        except ValueError:
            unread[spec.name] = "see access"
        except NotChecked as reason:
            no_answer = str(reason)
        if no_answer:
            unread[spec.name] = no_answer
    here = [spec for spec in specs if spec.name not in unread]
    unread |= first_documents(here, seconds=_DOCUMENTS_SECONDS)
    count = f"the first document of {len(specs) - len(unread)} of {len(specs)} datasets was read"
    if unread:
        name, why = next(iter(unread.items()))
        raise NotChecked(f"{count}; {name}: {why}")
    return count


def first_documents(specs: Sequence[SourceSpec], *, seconds: float) -> dict[str, str]:
    """Reads the first document of every source.

    They are of kind huggingface, and streamed; `seconds` are for all of them.

    Returns:
        The reason by source, for sources that could not be read although the recipe is right.

    Raises:
        ValueError: a source's reader refuses its input, or finds no document.
    """
    unread = {spec.name: f"not read within {seconds:g} seconds" for spec in specs}
    refusals: list[ValueError] = []

    def read() -> None:
        for spec in specs:
            try:
                reason = _reason_unread(spec)
            except ValueError as error:
                refusals.append(error)
                return
            unread.pop(spec.name)
            if reason:
                unread[spec.name] = reason

    # libraries retry for minutes where a network drops packets, and cannot be stopped
    reader = Thread(target=read, name="first documents", daemon=True)
    reader.start()
    reader.join(seconds)
    if refusals:
        raise refusals[0]
    return dict(unread)


def _reason_unread(spec: SourceSpec) -> str | None:
    """Reads up to the first document; returns None, or the reason why none can be read."""
    try:
        for item in open_inputs(spec):
            for number, text in enumerate(item.records(None), start=1):
                if text is not None:
                    return None
                if number == RECORDS:
                    return f"its filter drops the first {RECORDS:,} records"
    except Exception as error:  # the library's loaders raise many kinds
        line = " ".join(str(error).split()).removeprefix(f"source {spec.name}: ")[:400]
        line = line or type(error).__name__
        cause: BaseException | None = error
        while cause is not None:
            if _NETWORK & {kind.__name__ for kind in type(cause).__mro__}:
                return f"the network failed ({line})"
            cause = cause.__cause__ or cause.__context__
        raise ValueError(f"source {spec.name}: {line}") from None
    raise ValueError(
        f"source {spec.name}: no record of {spec.path} is a document: correct its subset, split or "
        "filter"
    )
