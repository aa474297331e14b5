"""`nemo-rod rehearse`: the recipe's own stages, run in small."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from nemo_rod.commands.run_stages import execute, shows_dry_run
from nemo_rod.config import Config, config_class, section
from nemo_rod.corpus.adapters.hub_files import file_of
from nemo_rod.corpus.adapters.synthetic import synthetic_documents
from nemo_rod.corpus.input_files import pick_evenly
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.plan.command import make_plan
from nemo_rod.lab.rehearsal import derive
from nemo_rod.lab.rehearsal.forms import SmallModel, small_form
from nemo_rod.lab.rehearsal.preflight import preflight
from nemo_rod.lab.rehearsal.section import Rehearsal
from nemo_rod.lab.rehearsal.table import DONE, FAILED, LEFT_OUT, UNSEEN, Row, as_dict, format_table
from nemo_rod.lab.tasks.held_out_questions import write_task
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run import hub
from nemo_rod.run.checks import check, to_config
from nemo_rod.run.held_out_losses import BLOCK_LOSSES
from nemo_rod.run.hub import NotChecked
from nemo_rod.run.launch import queue
from nemo_rod.run.launch.submit import check_idle
from nemo_rod.run.processes.pythons import num_gpus
from nemo_rod.run.stage_log import StageLog
from nemo_rod.run.stages import Stages
from nemo_rod.signals import Stopped

TABLE = "table.json"
_POLL_SECONDS = 5.0  # between two queries of a queue
_QUESTIONS, _CHOICES, _LETTERS = 8, 4, 16  # size of a made task; letters of a text
_COMPARED = 8  # held-out blocks of a source
# overrides that belong to one recipe, not to those whose runs it uses
_OWN = (
    *("recipe", "run_dir", "arm", "parallel", "variants", "rehearsal.run_dir"),
    *("model=", "model.hf", "model.shape", "model.architecture"),
)


@shows_dry_run
def rehearse(config: Config) -> None:
    """Rehearses a recipe and prints the table of its parts.

    Raises:
        ValueError: the model has no shrunken form, the folder is not a rehearsal's, or another
            rehearsal is running in it.
        RuntimeError: a part of the rehearsal failed.
    """
    options, folder = section(config, Rehearsal), rehearsal_folder(config)
    if not config.dry_run:
        if folder.is_dir():
            for run in (folder, *folder.glob("others/*")):
                earlier = config_class()()
                earlier.run_dir = str(run)
                check_idle(earlier)
                if any(StageLog(run, r.stem).is_held() for r in run.glob("launch/stages/*.jsonl")):
                    raise ValueError(f"Another rehearsal is running in {run}: wait for it to end.")
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_json(folder / TABLE, as_dict(config.recipe, [], None))  # marks the folder
    rows = [_run_check(name, action) for name, action in preflight(config).items()]
    if others := derive.other_runs(config):
        names = lambda: ", ".join(_recipe_for(run).recipe for run in others)  # noqa: E731
        rows.append(_run_check("other runs", names))
    if not any(row.state == FAILED for row in rows) and not config.dry_run:
        rows += _rehearse(config, folder, scale=options.steps / config.train.steps)
    plan = None
    with suppress(ValueError):  # the row of the layout shows it
        plan = make_plan(config)
    print(format_table(config.recipe, rows, plan))
    if not config.dry_run:
        write_json(folder / TABLE, as_dict(config.recipe, rows, plan))
    if failed := [row.name for row in rows if row.state == FAILED]:
        raise RuntimeError(f"the rehearsal of {config.recipe} failed at {failed[0]}: see above")


def rehearsal_folder(config: Config) -> Path:
    """Returns the folder of the rehearsal.

    Raises:
        ValueError: it is the folder of the real run, inside or around it, or holds other files.
    """
    folder = Path(section(config, Rehearsal).run_dir or f"{config.run_dir.rstrip('/')}_rehearsal")
    real, resolved = Path(config.run_dir).absolute().resolve(), folder.absolute().resolve()
    if resolved == real or real in resolved.parents or resolved in real.parents:
        raise ValueError(
            f"rehearsal.run_dir={folder} and run_dir={config.run_dir} share a folder: a rehearsal "
            "never writes into the folder of the real run; choose one beside it."
        )
    if folder.exists() and any(folder.iterdir()):
        with suppress(ValueError, OSError):  # another program's file of that name
            if {"recipe", "rows", "plan"} <= read_json(folder / TABLE).keys():
                return folder
        raise ValueError(
            f"{folder} holds files, and no rehearsal: choose another rehearsal.run_dir."
        )
    return folder


def small_model(config: Config, stages: int = 1, *, keeps_vocabulary: bool = False) -> SmallModel:
    """Returns the small form of the recipe's model, in this many pipeline stages.

    Raises:
        ValueError: its architecture has no shrunken form, or is not known here.
    """
    name = str(config.model.hf)
    file = file_of(name, "config.json")
    described = config.model.shape if file is None else read_json(file)
    if described is None:
        raise ValueError(
            f"The architecture of {name} is not known here: set model.shape to the "
            "content of its config.json, or model.hf to a folder that holds it."
        )
    return small_form(described, where=name, stages=stages, keeps_vocabulary=keeps_vocabulary)


def _rehearse(
    config: Config, folder: Path, *, scale: float, prefix: str = "", least: float = 0.0
) -> list[Row]:
    """Runs the rehearsals that this one uses, on equal blocks, then its own stages."""
    rows, used = list[Row](), derive.other_runs(config)
    others = {run: replace(_recipe_for(run), arms=arms) for run, arms in used.items()}
    short = [derive.cut_short(c, folder, scale=scale) for c in (config, *others.values())]
    least = max(least, *map(derive.batches_drawn, short))
    for run, other in others.items():
        inner, label = derive.folder_of_other(folder.absolute(), run), f"{prefix}{other.recipe}: "
        rows += _rehearse(other, inner, scale=scale, prefix=label, least=least)
    start, notes = time.monotonic(), list[str]()
    try:
        small = make_rehearsal(config, folder, scale, notes, least)
        made = Row(name="materials", state=DONE, note="; ".join(notes))
    except (ValueError, OSError) as error:
        small, made = None, Row(name="materials", state=FAILED, note=" ".join(str(error).split()))
    own = [replace(made, seconds=time.monotonic() - start)]
    own += [] if small is None else _run(small)
    return rows + [replace(row, name=prefix + row.name) for row in own]


def make_rehearsal(
    config: Config, folder: Path, scale: float, notes: list[str], least: float = 0.0
) -> Config:
    """Makes what a rehearsal needs; returns its configuration, checked.

    Args:
        config: the recipe.
        folder: of the rehearsal; gets the small base and made tasks.
        scale: steps of the rehearsal over those of the recipe.
        notes: takes a line about everything that differs from the recipe beside sizes.
        least: batches for which there is to be text.
    """
    small = derive.cut_short(config, folder, scale=scale)
    checkpoint = folder.absolute() / derive.CHECKPOINT
    if section(config, Rehearsal).model == "own":
        derive.cap_sources(small, least=least)
        check(small)
        return small
    limit, gpus = section(config, Rehearsal).processes, num_gpus()
    if limit is None and config.launcher.kind == "local" and gpus:
        limit = gpus
    answers = hub.answers(hub.repos(config)).items()
    silent = {key for key, answer in answers if isinstance(answer, NotChecked)}
    parallel, lost = derive.small_layout(config.parallel, limit)
    if lost:
        notes.append(f"parallel.{', parallel.'.join(lost)} reduced to 1 on {limit} processes")
    is_made = "domain.tokenizer" in silent
    derive.shrink(small, parallel, tokenizer=str(checkpoint) if is_made else None)
    if is_made:
        notes.append("the tokenizer is one of bytes, as the hub does not answer")
    unread = derive.sources_out_of_reach(config, silent)
    derive.cap_sources(small, unread, least)
    for reason in dict.fromkeys(unread.values()):
        names = [name for name, why in unread.items() if why == reason]
        notes.append(f"made-up text for {', '.join(names)}, as {reason}")
    if config.launcher.kind == "local" and not gpus:
        small.cluster.gpu = None
        for key in ("precision_aware_optimizer", "optimizer_offload"):
            if getattr(small.train, key):
                setattr(small.train, key, False)
                notes.append(f"train.{key} needs a GPU, and is rehearsed without")
    # NeMo-RL's workers have keys of their own, and evaluation runs here
    runs_here = config.launcher.kind in ("local", "nemo_rl")
    if runs_here and small.model.provider and not gpus:
        small.model.provider = {}
        notes.append("model.provider needs GPUs, and is rehearsed without")
    folder.mkdir(parents=True, exist_ok=True)
    if config.model.hf is not None:
        from nemo_rod.corpus.tokenizer import BYTE, load_tokenizer
        from nemo_rod.lab.rehearsal.small_checkpoint import write_checkpoint

        stages = parallel.pipeline * parallel.virtual_pipeline
        model = small_model(config, stages, keeps_vocabulary=not is_made)
        write_checkpoint(model, checkpoint, precision=config.model.precision)
        own = config.domain.tokenizer if "model.hf" in silent else config.model.hf
        trusts = config.model.trust_remote_code
        tokenizer = load_tokenizer(BYTE if is_made else own, trust_remote_code=trusts)
        tokenizer.save_pretrained(checkpoint)
    check(small)
    capabilities = section(config, Tasks).capabilities  # rehearsed by questions without meaning
    tasks = sorted({name for names in capabilities.values() for name in names})
    for number, name in enumerate(tasks):
        rows = []
        for question, text in zip(range(_QUESTIONS), synthetic_documents(number), strict=False):
            pieces = [text[at : at + _LETTERS] for at in range(0, len(text), _LETTERS)]
            context, *choices = pieces[: 1 + _CHOICES]
            rows.append({"context": context, "choices": choices, "answer": question % _CHOICES})
        write_task(name, rows, folder.absolute() / derive.TASKS)
    return small


def _run(small: Config) -> list[Row]:
    """Runs or submits the stages of a rehearsal up to a failure; returns their states."""
    stages, folder = Stages(small), Path(small.run_dir)
    chosen, reason = stages.all(), ""
    try:
        with redirect_stdout(StringIO()):  # the report's verdict means nothing here
            execute(stages, chosen, is_launch=True)
        while stages.launcher.submits and queue.alive(folder):
            time.sleep(_POLL_SECONDS)
    except Stopped:
        raise
    except Exception as error:  # shown in the table, with what was done before
        reason = " ".join(str(error).split()) or type(error).__name__
    rows = list[Row]()
    for stage in chosen:
        events = StageLog(folder, stage.name).events()
        last = events[-1] if events else {}
        state = {"done": DONE, None: LEFT_OUT}.get(last.get("event"), FAILED)
        note, reason = last.get("why", ""), "" if state == FAILED else reason
        if state == FAILED and not note:
            note = f"its job ended without a record of the reason: see {folder}/logs/slurm"
        starts = [event["time"] for event in events if event["event"] == "began"]
        seconds = max(0.0, last["time"] - starts[-1]) if starts else None  # clocks are set back
        rows.append(Row(name=stage.name, state=state, note=note, seconds=seconds))
    states = [row.state for row in rows]
    if reason:  # no stage has begun
        rows.insert(0, Row(name="stages", state=FAILED, note=reason))
    elif LEFT_OUT in states and FAILED not in states:
        first = states.index(LEFT_OUT)
        why = f"its job ended before the stage began: see {folder}/logs/slurm"
        rows[first] = replace(rows[first], state=FAILED, note=why)
    if all(row.state == DONE for row in rows) and small.model.hf is not None:
        rows.append(_run_check("losses", lambda: _compare_losses(small)))
    return rows


def _compare_losses(small: Config) -> str:
    """Compares held-out losses of the exports with those of Hugging Face's own classes."""
    from nemo_rod.checkpoints.losses import TOLERANCE, distance, load

    if section(small, Rehearsal).model == "own":
        raise NotChecked("only the base was compared with transformers, before its first use")
    run, precision, largest = Stages(small).results, small.model.precision, 0.0
    store = BlockStore(run.blocks, split="holdout")
    names = list(dict.fromkeys(["base", *small.arms]))
    for arm in names:
        model, tolerance = load(run.checkpoint(arm)), TOLERANCE[precision]
        losses_N = np.load(run.arm(arm) / BLOCK_LOSSES)
        for source in store.sources:
            ids_C = source.start + np.array(pick_evenly(range(source.count), _COMPARED))
            far = distance(model, store.tokens(ids_C), losses_N[ids_C].mean(dtype=float), tolerance)
            if not far <= tolerance:
                raise ValueError(
                    f"The held-out loss of {arm} on {source.name} differs by {far:.2g} nats from "
                    f"that of Hugging Face's {type(model).__name__} on the same weights, expected "
                    f"at most {tolerance:g}: the checkpoint and its conversion do not agree."
                )
            largest = max(largest, far)
    return (
        f"the exports of {len(names)} models reload; their losses are Hugging Face's to "
        f"{largest:.1g} nats ({precision})"
    )


def _run_check(name: str, action: Callable[[], str]) -> Row:
    start = time.monotonic()
    try:
        state, note = DONE, action()
    except NotChecked as reason:
        state, note = UNSEEN, str(reason)
    except (ValueError, OSError) as error:
        state, note = FAILED, " ".join(str(error).split())
    return Row(name=name, state=state, note=note, seconds=time.monotonic() - start)


def _recipe_for(run: str) -> Config:
    """Composes the recipe of a run's folder, with this command's other overrides.

    Raises:
        ValueError: there is no recipe of that name.
    """
    recipes = GlobalHydra.instance().config_loader().get_group_options("recipe")
    name = next((part for part in Path(run).parts if part in recipes), None)
    if name is None:
        raise ValueError(
            f"{run} names no recipe, so the run that it holds cannot be rehearsed: expected a "
            "folder such as runs/german_qwen3_5_4b."
        )
    overrides = HydraConfig.get().overrides.task
    shared = [o for o in overrides if not o.lstrip("+~").startswith(_OWN)]
    composed = compose("config", overrides=[f"recipe={name}", *shared])
    composed.recipe = name  # composing takes the name from this command's own choices
    return to_config(composed)
