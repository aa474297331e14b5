"""What a rehearsal looks at in the real recipe before it makes anything: names, ids, access.

Each look returns what it found, or raises ValueError with what is wrong and what to do. A look that
needs the network where there is none raises `NotLooked`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_rod.config import Config
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.files import read_json
from nemo_rod.lab.plan.fits import refuse_what_does_not_fit
from nemo_rod.lab.plan.of_recipe import make_plan
from nemo_rod.lab.rehearsal.first_documents import first_documents
from nemo_rod.lab.rehearsal.special_tokens import SpecialTokens, published_file, special_tokens
from nemo_rod.lab.tasks import stage as tasks
from nemo_rod.trust import name_and_revision

_DOCUMENTS_SECONDS = 300.0  # for the first documents of all sources
GATED = "accept its terms on the hub, and set HF_TOKEN to a token of that account"


class NotLooked(Exception):
    """Why something could not be looked at here."""


def looks(config: Config) -> dict[str, Callable[[], str]]:
    """Returns what to look at, by name, in order."""
    found: dict[str, Callable[[], str]] = {"layout": lambda: look_at_layout(config)}
    if config.model.hf is not None:
        found |= {
            "tokenizer": lambda: look_at_tokenizer(config),
            "end of documents": lambda: look_at_separator(config),
            "class": lambda: look_at_class(config),
        }
    found["access"] = lambda: look_at_access(config)
    if any(spec.kind == "huggingface" for spec in config.domain.specs):
        found["documents"] = lambda: look_at_documents(config)
    if tasks.wanted(config):
        found["tasks"] = lambda: tasks.check(config)
    return found


def look_at_layout(config: Config) -> str:
    """Checks that the layout divides the model, and fits its processors.

    Raises:
        ValueError: if it does not.
    """
    plan = make_plan(config)
    refuse_what_does_not_fit(plan.memory)
    return str(plan.layout["text"])


def look_at_tokenizer(config: Config) -> str:
    """Checks that the blocks' tokenizer gives ids their meaning in the model.

    Raises:
        ValueError: if it is another family's.
    """
    name, model = config.domain.tokenizer, str(config.model.hf)
    if name == model:
        return f"{name}, the model's own"
    tokens, of_model = special_tokens(name), special_tokens(model)
    theirs, own, how = tokens.ids, of_model.ids, _how_known(tokens, of_model)
    shared = theirs.keys() & own.keys()
    if any(theirs[token] != own[token] for token in shared) or not shared:
        token = min(shared, key=lambda token: theirs[token], default=min(theirs))
        raise ValueError(
            f"domain.tokenizer={name} is the tokenizer of another model than model.hf={model} "
            f"({token} is id {theirs[token]}, the model has it at {own.get(token)}{how}): its ids "
            "mean other text to the model; set domain.tokenizer=${model.hf}."
        )
    renamed = [token for token in theirs if token not in own]
    if renamed and config.model.special_tokens == "same":
        raise ValueError(
            f"domain.tokenizer={name} has special tokens that are not those of model.hf={model} "
            f"({', '.join(renamed[:3])}): set model.special_tokens=renamed if only their names "
            "differ, or domain.tokenizer=${model.hf}."
        )
    return f"{name}, with the ids of {model}{how}"


def look_at_separator(config: Config) -> str:
    """Checks that documents end with the token that ended them in pretraining.

    Raises:
        ValueError: if they do not.
        NotLooked: if nobody knows which token that was.
    """
    tokens = special_tokens(config.domain.tokenizer)
    chosen, expected, how = config.domain.eod, tokens.separator, _how_known(tokens)
    eod = tokens.ids[tokens.eos] if chosen is None else chosen
    if expected is None:
        raise NotLooked(
            f"documents end with id {eod} ({tokens.name_of(eod)}); what ended them in the "
            f"pretraining of {config.model.hf} is not known here"
        )
    if eod == tokens.ids[expected]:
        return f"id {eod}, {expected}{how}"
    raise ValueError(
        f"Documents would end with id {eod} ({tokens.name_of(eod)}), but in the pretraining of "
        f"{config.model.hf} they ended with id {tokens.ids[expected]} ({expected}{how}): set "
        f"domain.eod={tokens.ids[expected]}."
    )


def _how_known(*tokenizers: SpecialTokens) -> str:
    return "" if all(tokens.was_read for tokens in tokenizers) else ", as known here, not read"


def look_at_class(config: Config) -> str:
    """Checks that the installed transformers has the checkpoint's class.

    Raises:
        ValueError: if it has not.
        NotLooked: if the checkpoint's config.json is not on this machine.
    """
    described = published_config(str(config.model.hf))
    if described is None:
        raise NotLooked(f"config.json of {config.model.hf} is not on this machine")
    import transformers

    named = str((described.get("architectures") or ["no class"])[0])
    if hasattr(transformers, named):
        return named
    if "auto_map" in described and config.model.trust_remote_code:
        return f"{named}, by the checkpoint's own code"
    cure = "install one that has it"
    if "auto_map" in described:
        cure += ", or set model.trust_remote_code=true to run the code that the checkpoint brings"
    raise ValueError(
        f"{config.model.hf} is of the class {named}, which the installed transformers "
        f"{transformers.__version__} lacks: {cure}."
    )


def look_at_access(config: Config) -> str:
    """Checks that the hub would give out the checkpoint and every dataset.

    Raises:
        ValueError: if one is gated and the token, or its terms, are missing; or does not exist.
        NotLooked: if the hub cannot be reached.
    """
    wanted = {(spec.path, "dataset") for spec in config.domain.specs if spec.path}
    wanted |= {(name, "model") for name in (config.model.hf, config.domain.tokenizer)
               if name not in (None, "byte")}  # fmt: skip
    remote = sorted((name, kind) for name, kind in wanted if name and not _is_here(name))
    if not remote:
        return "everything is on this machine"
    for name, kind in remote:
        _ask_the_hub(name, kind)
    return f"{len(remote)} repositories of the hub can be read"


def look_at_documents(config: Config) -> str:
    """Checks that every Hugging Face dataset has a first document, as the source's reader reads it.

    Raises:
        ValueError: if one has none; with the reader's sentence.
        NotLooked: if one could not be read here.
    """
    specs = [spec for spec in config.domain.specs if spec.kind == "huggingface"]
    unread = _out_of_reach(specs)
    here = [spec for spec in specs if spec.name not in unread]
    unread |= first_documents(here, seconds=_DOCUMENTS_SECONDS)
    count = f"the first document of {len(specs) - len(unread)} of {len(specs)} datasets was read"
    if unread:
        name, why = next(iter(unread.items()))
        raise NotLooked(f"{count}; {name}: {why}")
    return count


def _out_of_reach(specs: Sequence[SourceSpec]) -> dict[str, str]:
    """Returns why a dataset cannot be read here, by source; a hub that is silent is asked once."""
    found: dict[str, str] = {}
    silent = ""
    for spec in specs:
        if _is_here(str(spec.path)):
            continue
        try:
            if not silent:
                _ask_the_hub(str(spec.path), "dataset")
        except ValueError:
            found[spec.name] = "see access"
        except NotLooked as why:
            silent = str(why)
        if silent:
            found[spec.name] = silent
    return found


def _is_here(name: str) -> bool:
    return Path(name).expanduser().exists()


def _ask_the_hub(name: str, kind: str) -> None:
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        auth_check(name_and_revision(name)[0], repo_type=kind)
    except GatedRepoError:
        raise ValueError(
            f"The {kind} {name} is gated, and this account may not read it: {GATED}."
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"The hub knows no {kind} {name} that this account may read: correct its name, or set "
            "HF_TOKEN."
        ) from None
    except Exception as error:  # whatever the network's libraries raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotLooked(f"the hub does not answer ({reason:.120})") from None


def published_config(name: str) -> dict[str, Any] | None:
    """Returns a checkpoint's config.json from its folder or the hub's cache; None if not here."""
    file = published_file(name, "config.json")
    return None if file is None else read_json(file)
