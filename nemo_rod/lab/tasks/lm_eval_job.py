"""Benchmark tasks through lm-eval, by capability (paper, appendix "Evaluation").

`python -m nemo_rod.lab.tasks.lm_eval_job JOB.json` runs the tasks of one model. Every model has its
own process, because a backend may not free its memory.

Every entry of a capability is a task or a group of lm-eval. Its score is length-normalised accuracy
if the task defines it, otherwise plain accuracy; a group's score is over all its questions. A
capability's accuracy is the mean over its entries.

Everything that determines the numbers is recorded with them: versions, backend, settings, and for
each task its version, its shots and a digest of every prompt, choice and answer. Models can be
compared only if they answered exactly the same questions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import logging
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nemo_rod.files import digest, read_json, write_json
from nemo_rod.installation import pip_install
from nemo_rod.lab.data_alone import refuse_code
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.progress import Progress
from nemo_rod.signals import end_with_parent

METRICS = ("acc_norm", "acc")  # the preferred one first
# lm-eval's default metrics, by output type, that are no accuracy
_DEFAULTS = {"generate_until": ["exact_match"], "loglikelihood_rolling": ["word_perplexity"]}
BACKENDS = {"hf": "transformers", "vllm": "vllm"}  # lm-eval's model -> package that runs it
_ENTRIES_PER_CALL = 8  # between two writes; each lm-eval call also describes the machine


@dataclass
class TaskJob:
    """The job of the process that runs the tasks of one model."""

    name: str  # name of the model, for progress
    model: str  # Hugging Face checkpoint
    out: str  # output file; partial results are written beside it
    tasks: Tasks  # its `include` is None for lm-eval's own definitions
    # other inputs of the answers, such as the digest of the weights; recorded
    inputs: dict[str, Any]

    def configuration(self) -> dict[str, Any]:
        """Returns the settings that compared models must share, versions included."""
        compared = dataclasses.asdict(self.tasks)
        for key in ("include", "batch_size", "held_out"):
            del compared[key]
        packages = ("lm_eval", BACKENDS[self.tasks.backend])
        return {**compared, **{name: importlib.metadata.version(name) for name in packages}}


def check_installed(backend: str) -> None:
    """Refuses a backend that is not installed.

    Raises:
        ValueError: with the package to install.
    """
    for module in ("lm_eval", BACKENDS[backend]):
        if importlib.util.find_spec(module) is None:
            extra = "eval,vllm" if module == "vllm" else "eval"
            raise ValueError(
                f"tasks={backend} needs {module}, which is not installed: "
                f"{pip_install(extra)}, or set tasks=none."
            )


def task_manager(include: str | None, names: Sequence[str] = ()) -> Any:
    """Returns lm-eval's manager of the tasks in a folder; None for lm-eval's own tasks.

    Of its own 14,000 files, which take it 8 s, it reads with `names` those below folders with a
    file that mentions one, unless a tag is named, or part of a group lies elsewhere.
    """
    from lm_eval import tasks

    if include is None and names:
        word = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])")
        files = Path(tasks.__file__).parent.rglob("*yaml")  # some tags are those of templates
        found = {file: word.findall(file.read_text("utf-8", "replace")) for file in files}
        folders = {file.parent for file, mentioned in found.items() if mentioned}
        tops = [folder for folder in folders if not folders & {*folder.parents}]
        logging.getLogger("lm_eval.tasks").setLevel(logging.ERROR)  # a tag may be of several
        manager = tasks.TaskManager(include_path=tops, include_defaults=False)
        needed = {*_definitions({*chain(*found.values())}, manager)}
        # of a tag, the manager keeps what the last folder has
        if {*names} <= needed <= {*manager.all_tasks} and not needed & {*manager.all_tags}:
            return manager
    return tasks.TaskManager(include_path=include, include_defaults=include is None)


def refuse_unknown(names: Sequence[str], manager: Any) -> None:
    """Refuses entries that lm-eval does not know, or that state no accuracy among their metrics.

    Definitions alone are read: no model, no questions.

    Raises:
        ValueError: the message names the entries.
    """
    definitions, known = _definitions(names, manager), {*manager.all_tasks}
    if unknown := [name for name in definitions if name not in known]:
        raise ValueError(
            f"lm-eval does not know {len(unknown)} of the {len(names)} tasks of tasks.capabilities "
            f"({', '.join(unknown)}): correct their names or tasks.include, or install the version "
            "that has them."
        )
    wrong = []
    for name, definition in definitions.items():
        listed, kind = definition.get("metric_list") or (), definition.get("output_type")
        metrics = [str(row.get("metric")) for row in listed if isinstance(row, dict)]
        metrics = (
            metrics or _DEFAULTS.get(str(kind), []) or ["no task"] * (definition.get("task") == [])
        )
        if kind == "generate_until" and "process_results" not in definition:
            metrics = [f"{one} of generated text" if one in METRICS else one for one in metrics]
        if metrics and not {*METRICS} & {*metrics}:
            wrong.append(f"{name} ({', '.join(metrics)})")
    if wrong:
        raise ValueError(
            f"tasks.capabilities has tasks without an accuracy, {', '.join(wrong)}: take them out, "
            f"as one of {METRICS} is expected among a task's metrics."
        )


def _definitions(names: Iterable[Any], manager: Any) -> dict[str, dict[str, Any]]:
    """Returns what tasks, groups and tags are made of, and all that these consist of."""
    found = dict[str, dict[str, Any]]()
    left = [name for name in names if isinstance(name, str)]
    while left:
        name = left.pop(0)
        entry = manager.task_index.get(name)
        found[name] = getattr(entry, "cfg", None) or {}
        inner = found[name].get("task", ()) if "group" in found[name] else ()
        inner = sorted(entry.tags) if name in manager.all_tags else inner
        left += [each for each in inner if isinstance(each, str) and each not in found]
    return found


def main() -> int:
    """Runs the job named on the command line and returns the exit status."""
    end_with_parent()
    values = json.loads(Path(sys.argv[1]).read_text())
    job = TaskJob(**values | {"tasks": Tasks(**values["tasks"])})
    total = len({*chain.from_iterable(job.tasks.capabilities.values())})
    progress = Progress(f"tasks of {job.name}", total, unit="tasks")
    try:
        evaluate_tasks(job, progress.step)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"nemo-rod error on rank 0: {kind}{' '.join(str(error).split())}", flush=True)
        return 1
    return 0


def evaluate_tasks(job: TaskJob, show: Callable[[int, str], None]) -> None:
    """Runs all tasks of one model and writes `job.out`; resumes an earlier attempt.

    `show` is called with the number of finished entries and the name of the next.

    Raises:
        ValueError: a task defines no accuracy, or an earlier attempt had other settings.
    """
    out = Path(job.out)
    partial = out.with_suffix(".partial.json")
    made_from = {"configuration": job.configuration(), "inputs": job.inputs}
    done: dict[str, Any] = {}
    if partial.exists():
        earlier = read_json(partial, *made_from)
        if {key: earlier[key] for key in made_from} != json.loads(json.dumps(made_from)):
            raise ValueError(
                f"{partial} was begun with another task configuration or other weights: add "
                "rebuild=[evaluate] to run the tasks again, or choose another run_dir."
            )
        done = earlier["tasks"]
    entries = list(dict.fromkeys(chain.from_iterable(job.tasks.capabilities.values())))
    pending = [name for name in entries if name not in done]
    if pending:
        from lm_eval import simple_evaluate
        from lm_eval.api.registry import get_model

        manager = task_manager(job.tasks.include)
        refuse_unknown(pending, manager)
        model = get_model(job.tasks.backend).create_from_arg_obj(model_arguments(job))
        if job.tasks.backend == "hf":
            refuse_forgotten_chunks(model.model)
    for start in range(0, len(pending), _ENTRIES_PER_CALL):
        portion = pending[start : start + _ENTRIES_PER_CALL]
        show(len(done), portion[0])
        seeds = [f"{kind}random_seed" for kind in ("", "numpy_", "torch_", "fewshot_")]
        options: dict[str, Any] = {"num_fewshot": job.tasks.few_shot, "limit": job.tasks.limit}
        options |= {"tasks": portion, "task_manager": manager, "bootstrap_iters": 0}
        try:
            results = simple_evaluate(
                model, log_samples=True, **options, **dict.fromkeys(seeds, job.tasks.seed)
            )
        except (LookupError, TypeError, FileNotFoundError, ZeroDivisionError, RecursionError) as e:
            raise ValueError(
                f"lm-eval fails in one of {', '.join(portion)} ({type(e).__name__}: {e}): correct "
                "its definition or data, or take it out of tasks.capabilities."
            ) from e
        for name in {*portion} & {*manager.all_tags}:
            results["group_subtasks"][name] = sorted(manager.task_index[name].tags)
        done |= {name: entry_for(name, results) for name in portion}
        write_json(partial, {**made_from, "tasks": done})
    show(len(entries), "")
    accuracy = {name: entry["accuracy"] for name, entry in done.items()}
    capabilities = capability_accuracy(job.tasks.capabilities, accuracy)
    tasks = {name: done[name] for name in entries}
    write_json(out, {**made_from, "capabilities": capabilities, "tasks": tasks})
    partial.unlink(missing_ok=True)


def capability_accuracy(
    capabilities: Mapping[str, Sequence[str]], accuracy: Mapping[str, float]
) -> dict[str, float]:
    """Returns the unweighted mean accuracy of each capability's entries."""
    return {
        capability: math.fsum(accuracy[name] for name in names) / len(names)
        for capability, names in capabilities.items()
    }


def refuse_forgotten_chunks(model: Any) -> None:
    """Makes layers of Mamba-2 without kernels refuse texts longer than a chunk of theirs.

    A forward pass of a transformers model then raises ValueError instead of returning wrong scores.
    """
    from nemo_rod.checkpoints.losses import forgets_chunks

    def check_and_forward(layer: Any, forward: Any, states: Any, *args: Any, **options: Any) -> Any:
        if states.shape[1] > layer.chunk_size:
            raise ValueError(
                "tasks.backend=hf runs Mamba-2 in transformers' torch code here, which is wrong "
                f"for texts longer than chunk_size={layer.chunk_size} tokens, and one has "
                f"{states.shape[1]}: install mamba-ssm and causal-conv1d and evaluate on a GPU, or "
                "set tasks.backend=vllm."
            )
        return forward(states, *args, **options)

    for layer in filter(forgets_chunks, model.modules()):
        layer.torch_forward = functools.partial(check_and_forward, layer, layer.torch_forward)


def model_arguments(job: TaskJob) -> dict[str, Any]:
    """Returns the constructor arguments of lm-eval's model class."""
    arguments = {"pretrained": job.model, **job.tasks.arguments, "batch_size": job.tasks.batch_size}
    if not arguments.get("trust_remote_code"):
        refuse_code(Path(job.model))
    if job.tasks.backend == "hf":
        import torch

        from nemo_rod.corpus.adapters.hub_tokenizer import own_tokenizer

        arguments["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        trusted = bool(arguments.get("trust_remote_code"))
        with suppress(ValueError):  # lm-eval is to refuse the model
            tokenizer, _, replaced = own_tokenizer(job.model, trusted)
            if replaced:  # lm-eval would load the class, with other ids than those of training
                arguments["tokenizer"] = tokenizer
    return arguments


def entry_for(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns lm-eval's results of one task or group, as recorded.

    Raises:
        ValueError: a task has no accuracy.
    """
    leaves = {}
    for leaf in _leaves(name, results):
        samples = results["samples"][leaf]
        scores = results["results"][leaf]
        keys = (key for m in METRICS for key in scores if key.partition(",")[0] == m)
        if (key := next(keys, None)) is None:  # "acc,none", or "acc," and the name of a filter
            raise ValueError(
                f"Task {leaf} reports {sorted(scores)}, expected one of {METRICS}: take it out of "
                "tasks.capabilities."
            )
        leaves[leaf] = {
            "metric": key.removesuffix(",none"),
            "accuracy": float(scores[key]),
            "questions": len({sample["doc_id"] for sample in samples}),
            "version": results["versions"].get(leaf),
            "few_shot": results["n-shot"].get(leaf),
            "prompts": prompts_digest(samples),
        }
    total = sum(leaf["questions"] for leaf in leaves.values())
    right = math.fsum(leaf["questions"] * leaf["accuracy"] for leaf in leaves.values())
    return {"accuracy": right / total, "questions": total, "leaves": leaves}


def _leaves(name: str, results: Mapping[str, Any]) -> list[str]:
    """Returns the tasks of a task or group, including those of its subgroups."""
    if name in results["samples"]:
        return [name]
    inner = results["group_subtasks"][name]
    return sorted({leaf for child in inner for leaf in _leaves(child, results)})


def prompts_digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """Returns a digest of every prompt, choice and answer of a task, in any order."""
    keys = ("doc_hash", "prompt_hash", "target_hash")
    lines = sorted(json.dumps([s["doc_id"], *(s[key] for key in keys)]) for s in samples)
    return digest("\n".join(lines).encode())


if __name__ == "__main__":
    sys.exit(main())
