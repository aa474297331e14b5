"""The part common to all hosts: a job that draws candidates, and the one that selects from them.

A host's `install` creates a `SelectingJob`, its `reference` a `HostReferenceJob`. The host passes
the trainer's data to `take_data`, replaces the schedule of every training step by `around(...)`,
and calls `end_step` after it. `nemo_rod.hosts.swap_in.install` describes the user's options.
"""

from __future__ import annotations

import atexit
import inspect
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.utils import get_model_config

from nemo_rod.hosts.job_policy import job_policy, multiplier_of, refuse_if
from nemo_rod.hosts.job_record import JobRecord, job_header, segments
from nemo_rod.hosts.save_helpers import end_with_rank
from nemo_rod.hosts.swap_in.job_data import (
    HeldOut,
    JobData,
    JobPools,
    JobReferences,
    losses_and_mask,
    parts_of,
    refuse_other_order,
)
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles, check_roles, check_weights
from nemo_rod.loggers import known_metrics
from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.ranks import all_or_none, from_recorder, is_recorder, peak_memory
from nemo_rod.selection import Candidates, OnNonfinite, Policy, References, Selector, TakeAll
from nemo_rod.selection.competition import number
from nemo_rod.selection.held_out import is_due
from nemo_rod.selection.policies import reference_roles
from nemo_rod.selection.references.folder import precision_name
from nemo_rod.upstream.functions import check

INSTALLED = "_nemo_rod"  # attribute that marks the selector in a trainer


def say_last(text: str) -> None:
    """Prints a line as this process ends, below the last of the trainer's."""
    atexit.register(lambda: print(f"nemo-rod: {text}", file=sys.stderr, flush=True))


class Installed(ExitStack):
    """Handle that `install` returns; as a context manager, it uninstalls at the end.

    The replacements stay in place if the handle is discarded.
    """

    def replace(self, target: Any, name: str, value: Any) -> None:
        """Gives an attribute of the host another value until `uninstall`."""
        # no context manager inside: it would undo the replacement with the handle's deletion
        self.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    def uninstall(self) -> None:
        """Restores every attribute's former value; a second call does nothing."""
        self.close()


def check_host(host: str, *replaceable: Any) -> None:
    """Refuses a host whose functions to replace differ from the tested ones.

    Raises:
        ValueError: a function differs or is missing, or one of `replaceable` is a replacement of
            ours: a selector is already installed.
    """
    if any(hasattr(item, INSTALLED) for item in replaceable):
        raise ValueError(
            "A selector, or reference(...), is installed already: uninstall() it before the next "
            "one, or start the script once for each."
        )
    check("scoring", f"swap_in/{host}")


_RESIZES = "changes the size of the pools"
# Settings that selection does not work with, by the name that they have on every host, and why not.
_UNSUPPORTED = {
    **dict.fromkeys(("use_megatron_fsdp", "use_torch_fsdp2"), "is not supported yet"),
    "sft": "packs samples of many lengths into a row",
    "inter_document_masking": "packs documents into a row",
    "dataloader_inter_document_masking": "packs documents into a row",
    "packed_sequence_specs": "packs documents into a row",
    "hybrid_context_parallel": "makes samples of many lengths",
    "fim_data": "needs references of samples that are drawn anew",
    "perform_rl_step": "trains on rollouts",
    **dict.fromkeys(("rampup_batch_size", "step_batch_size_schedule"), _RESIZES),
    "decrease_batch_size_if_needed": _RESIZES,
    "iterations_to_skip": "skips a different number of samples from a step's draw",
    "phase_transition_iterations": "resumes at samples that were not counted",
}
_LOADERS = {
    "cyclic": "reads in an order of its own",
    "external": "resumes at an offset that only the job knows",
    "batch": "makes packed or variable-length batches, not one sample per row",
}


class Facts(NamedTuple):
    """Facts about a job that its host has before the data is built."""

    batch_size: int  # samples trained on in one step (K)
    seed: int  # of the job's data
    steps: int  # of the whole job
    every: int | None  # steps between two validations of the job itself
    checkpoints: str | Path | None  # folder in which it saves them
    loads: str | Path | None = None  # folder from which it loads its own, if known


class Job:
    """A job that draws m times the samples it trains on, to select or to write references.

    Raises:
        ValueError: the multiplier is not a number of at least 1.
    """

    data: JobData  # its training data, once it is built
    unused: Collection[str] = ()  # keys of its samples that its forward step does not read
    state: Any = None  # the host's own, if the host must find it again
    # see `SelectingJob.around`
    around: Callable[[Callable, Any, int, Any, int], Callable]

    def __init__(
        self,
        *,
        roles: Roles,
        multiplier: float = Candidates.multiplier,
        out: str | Path | None = None,
    ) -> None:
        bound = Candidates.__dataclass_fields__["multiplier"].metadata["bound"]
        if not isinstance(multiplier, int | float) or not bound.accepts(multiplier):
            raise ValueError(
                f"multiplier={multiplier!r} is not valid: expected a number {bound.expected}."
            )
        self.roles, self.multiplier = roles, multiplier
        self._blends: Sequence[Any] = ()  # of the splits, if known before the data is built
        self.out = None if out is None else Path(out)

    def candidates(self, num_trained: int, batch_size: int) -> int:
        """Returns how many samples are drawn for a number of trained ones, K in a step."""
        return -(-num_trained * round(self.multiplier * batch_size) // batch_size)

    def take_data(self, train: Any, valid: Any, num_drawn: int, facts: Facts) -> None:
        """Takes the job's data once it is built, and again if the job restarts.

        Args:
            train: the training dataset; see `JobData`.
            valid: the validation dataset, or a list of several; None without one.
            num_drawn: samples that the job draws in all.
            facts: further facts of the job.

        Raises:
            ValueError: the roles, or the references, belong to other data, or there is less of it
                than the job's steps draw.
        """
        splits = [blend[0] for blend in self._blends[1:]]
        splits += [[part.dataset_path for part in parts_of(valid) if hasattr(part, "dataset_path")]]
        paths = [getattr(part, "dataset_path", "") for part in parts_of(train)]
        roles = self.roles = check_roles(self.roles, [paths, *splits])
        self.data = JobData(train, roles, num_samples=num_drawn, unused=self.unused)
        self.data.refuse_end(facts.steps * round(self.multiplier * facts.batch_size))

    def end_step(self, loss: Any, grad_norm: Any) -> None:
        """Ends the step whose schedule was the last, on all ranks; numbers may be missing."""

    @staticmethod
    def blends(blend: Any, per_split: Any) -> list[Any]:
        """Returns the blends of the splits, the train split's first, of two forms to give them."""
        train, *others = [blend] if blend else (per_split or [None])
        return [train, *filter(None, others)] if train else []

    def refuse(
        self,
        model: Any,
        ddp: Any,
        sections: Mapping[str, Any],
        *features: tuple[Any, str, str, str],
        blends: Sequence[Any],
    ) -> None:
        """Refuses, before anything starts, a job that selection does not support.

        Args:
            model: the model's configuration.
            ddp: that of the data-parallel wrapper.
            sections: objects with the job's settings, by the prefix of their names: `dataset.`, or
                `--` for arguments of a command line.
            features: for each further unsupported feature whether the job has it, its setting, the
                reason, and the cure.
            blends: paths and weights of the sources of every split, of the train split first;
                empty if not known yet.

        Raises:
            ValueError: the message names the setting, the reason and the cure; or a source has no
                role, or no weight.
        """
        refused = [feature[1:] for feature in features if feature[0]]
        for prefix, section in sections.items():
            names = [name for name in _UNSUPPORTED if getattr(section, name, None)]
            given = [(name, _UNSUPPORTED[name], "leave it out") for name in names]
            loader = getattr(section, "dataloader_type", None)
            if loader in _LOADERS:
                spelt = f"dataloader_type={loader!r}"
                given.append((spelt, _LOADERS[loader], "set it to 'single'"))
            for name, reason, cure in given:
                spelt = name.replace("_", "-") if prefix == "--" else name
                refused.append((prefix + spelt, reason, cure))
        for setting, reason, cure in refused:
            raise ValueError(f"Selection does not work with {setting}: it {reason}; {cure}.")
        self._blends = blends
        if blends:
            train = blends[0][0]
            roles = check_roles(self.roles, [blend[0] for blend in blends])
            assign_roles(train, roles, train=train)
            for prefixes, weights, *_ in blends:
                check_weights(prefixes, weights)
        refuse_unsafe(model, ddp)

    def put_into(
        self,
        host: str,
        trainer: Any,
        loaders: Any,
        facts: Callable[[], Facts],
        place: Callable[[dict[str, Any]], tuple[int, Any, int]],
    ) -> Installed:
        """Makes a Megatron trainer draw m times the training samples, and puts `around` into it.

        With virtual pipeline stages the trainer builds the same data once per stage.

        Args:
            host: name of the host.
            trainer: module with `train_step`.
            loaders: module with the functions that count and build the data.
            facts: function that returns the job's facts, called before the data is built.
            place: function from the arguments of `train_step`, by name, to the place of the step:
                its number, Megatron's process groups and the samples consumed before.

        Raises:
            ValueError: see `check_host`.
        """
        check_host(host, trainer.train_step)
        end_with_rank()
        count = loaders.get_train_valid_test_num_samples
        build = loaders.build_train_valid_test_datasets
        train_step = trainer.train_step
        signature = inspect.signature(train_step)
        drawn = 0

        def count_candidates(*args: Any) -> tuple[int, int, int]:
            nonlocal drawn
            train, valid, test = count(*args)
            drawn = self.candidates(train, facts().batch_size)
            return drawn, valid, test

        def build_and_pass_on(*args: Any, **kwargs: Any) -> tuple:
            datasets = build(*args, **kwargs)  # it counts first
            self.take_data(datasets[0], datasets[1], drawn, facts())
            return datasets

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            schedule, optimizer = call["forward_backward_func"], call["optimizer"]
            call["forward_backward_func"] = self.around(schedule, optimizer, *place(call))
            result = train_step(**call)
            losses, *_, grad_norm = result[:6]  # the losses on the last pipeline stage alone
            self.end_step(losses.get("lm loss"), grad_norm)
            return result

        setattr(rod_train_step, INSTALLED, True)
        installed = Installed()
        installed.replace(loaders, "get_train_valid_test_num_samples", count_candidates)
        installed.replace(loaders, "build_train_valid_test_datasets", build_and_pass_on)
        installed.replace(trainer, "train_step", rod_train_step)
        return installed


class SelectingJob(Job):
    """A job with the selector installed.

    Raises:
        ValueError: the multiplier or the references cannot be used.
    """

    held_out: HeldOut | None = None  # the data of its held-out losses

    def __init__(
        self,
        *,
        references: Sequence[str | Path] = (),
        policy: Policy | str | None = None,
        on_nonfinite: OnNonfinite = "refuse",
        validation_every: int | None = None,
        **data: Any,
    ) -> None:
        self.policy, files = job_policy(
            policy, on_nonfinite, validation_every, measures=validation_every != 0
        )
        self._decided_by = (self.policy, *files) if files else self.policy
        super().__init__(**{"multiplier": multiplier_of(self.policy)} | data)
        self.references, self.validation_every = references, validation_every
        self.on_nonfinite: OnNonfinite = on_nonfinite
        name, roles = type(self.policy).__name__, reference_roles(self.policy.needs)
        refuse_if(
            (roles and not references,
             f"{name} compares losses of {' and '.join(roles)} with reference losses: give their "
             "folders as 'references', or policy=TakeAll() with multiplier=1."),
            (isinstance(self.policy, TakeAll) and self.multiplier > 1,
             f"{name} chooses nothing, so multiplier={self.multiplier} would draw samples that "
             "are never used: set multiplier=1."),
        )  # fmt: skip
        if references:
            References.open(references)  # refuses missing or damaged ones before the job starts

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows metrics after `done` steps in the host's loggers, where it has them. Collective.

        On other ranks than the recording one, they may be empty.
        """

    def around_scoring(self) -> AbstractContextManager:
        """Returns a context in which the host preserves state that its forward step changes."""
        return nullcontext()

    def take_data(self, train: Any, valid: Any, num_drawn: int, facts: Facts) -> None:
        """Takes the data, and builds the selector; see `Job.take_data`."""
        super().take_data(train, valid, num_drawn, facts)
        data, self._facts = self.data, facts
        if self.out is None and facts.checkpoints is not None:
            self.out = Path(facts.checkpoints) / "rod"
        self._record: JobRecord | None = None  # of the recording rank
        self._is_open = False
        self._pools = JobPools(data, round(self.multiplier * facts.batch_size))
        references = None
        if self.references:
            try:
                roles = reference_roles(self.policy.needs)
                references = JobReferences.open(self.references, data, roles=roles)
            except ValueError as error:
                raise ValueError(
                    f"{error}. References of a job are valid only for its blend, roles, seed, "
                    "sample length, masks, number of steps and multiplier."
                ) from None
        data.compare = references.compare if references else None
        self._rod = RoDSelector(
            Selector(
                pools=self._pools,
                policy=self.policy,
                store=data,
                batch_size=facts.batch_size,
                references=references,
                on_nonfinite=self.on_nonfinite,
                seed=facts.seed,
                steps=facts.steps,
            ),
            data,
            scoring_micro_batch_size=0,  # as in training
            scoring_step=losses_and_mask,
            around_scoring=self.around_scoring,
        )
        every = self.validation_every
        self._every = facts.every if every is None else every
        try:
            if every != 0:
                self.held_out = HeldOut(valid, self.roles, unused=self.unused, train=data.prefixes)
        except ValueError as error:
            reason = (
                f"No held-out losses can be measured: {str(error).removesuffix('.')}; give the "
                "job a validation split of sources with roles, or set validation_every=0."
            )
            if every is not None or "held_out" in self.policy.needs:
                raise ValueError(reason) from None
            if is_recorder():
                print(f"nemo-rod: {reason}", file=sys.stderr, flush=True)

    def around(
        self, schedule: Callable, optimizer: Any, step: int, groups: Any, consumed: int
    ) -> Callable:
        """Returns the replacement for one training step's schedule.

        In the first step, it compares the samples that the job's own iterator would have trained on
        with those of the same places in its data, and opens the files.

        Args:
            schedule: the host's forward-backward function.
            optimizer: the host's optimizer, for the learning rate.
            step: number of the training step, from 0.
            groups: Megatron's process groups.
            consumed: samples that the job has trained on before this step.

        Raises:
            ValueError: the files belong to another run, the references are of another precision, or
                the job reads its data in another order; raised on all ranks.
        """
        self._began = time.perf_counter()
        # None if the optimizer holds no weights on this rank
        self._lr = next((group["lr"] for group in optimizer.param_groups if group), None)
        select = self._step = self._rod.around(schedule, step=step, groups=groups)

        def watched_schedule(**options: Any) -> Any:
            if options["forward_only"]:
                return schedule(**options)
            names = ("model", "forward_step_func", "micro_batch_size")
            self._call = {name: options[name] for name in names} | {"groups": groups}
            if not self._is_open:
                references = self._rod.selector.references
                if references is not None and self.policy.needs:
                    references.refuse_other_precision(precision_of(options["model"]))
                iterators = options["data_iterator"]
                count, size = options["num_microbatches"], options["micro_batch_size"]
                for chunk in iterators if isinstance(iterators, list) else [iterators]:
                    read = (self.data, chunk, consumed, count, size, groups.dp)
                    all_or_none(partial(refuse_other_order, *read))
                self._open(step, consumed)
                self._began = time.perf_counter()
            return select(**options)

        return watched_schedule

    def end_step(self, loss: Any, grad_norm: Any) -> None:
        """Records the step, and measures held-out losses; see `Job.end_step`."""
        choice, total = self._step.finish(), time.perf_counter() - self._began
        if choice is None:
            return
        done, row = choice.pool.step + 1, dict[str, Any]()
        metrics = {"train/loss": number(loss), "train/grad_norm": number(grad_norm)}
        metrics["train/lr"] = self._lr
        losses = dict[str, float]()
        if is_due(done, every=self._every, steps=self._facts.steps):
            losses = self._held_out_losses()
        if self._record is not None:
            row = self._record.end_step(choice, total, metrics | losses | peak_memory())
        if losses:
            self._rod.selector.tell_policy(row, from_recorder)
        self.log(done, _metrics_to_log(row))

    def _open(self, step: int, consumed: int) -> None:
        """Opens the record at the job's first step, before which it measures. Collective."""
        selector, size = self._rod.selector, self._pools.size
        self._pools.origin = consumed * size // selector.batch_size - step * size

        def open_record() -> bool:
            seed, steps = self._facts.seed, self._facts.steps
            header = job_header(selector, self.data, decided_by=self._decided_by, seed=seed)
            content = self.held_out.content() if self.held_out else ""
            self._record = JobRecord(
                self.out, header, step=step, steps=steps, held_out=content, former=self._former()
            )
            self._rod.on_choice = self._record.begin_step
            if self.out is not None:
                report = shlex.join(["nemo-rod", "report", str(self.out)])
                say_last(f"choices are in {self.out}; `{report}` shows them.")
            return self._record.is_new

        is_new, self._is_open = from_recorder(open_record), True
        find = partial(segments, self.out, self.data.digest, step)
        known = selector.resume(step, find, from_recorder)
        if known and not isinstance(self.policy, TakeAll) and is_recorder():
            print(
                f"nemo-rod: {type(self.policy).__name__} knows nothing of the steps before "
                f"{known}, which {self.out} does not record with the same data.",
                file=sys.stderr,
                flush=True,
            )
        if losses := self._held_out_losses() if is_new else {}:
            if self._record is not None:
                self._record.begin(losses)
            self.log(step, _metrics_to_log(losses))

    def _former(self) -> Path | None:
        """Returns the folder of the record of the job whose checkpoints this one loads."""
        loads = self._facts.loads
        if loads is None or self.out is None:
            return None
        # of a checkpoint's own folder, too
        folders = (Path(loads) / "rod", Path(loads).parent / "rod")
        found = next((each for each in folders if each.is_dir()), folders[0])
        return None if found.resolve() == self.out.resolve() else found

    def _held_out_losses(self) -> dict[str, float]:
        """Measures with the current weights; empty for a job without held-out data. Collective."""
        if self.held_out is None:
            return {}
        with self.around_scoring():
            return self.held_out.losses(**self._call)


def precision_of(model: list) -> str:
    """Returns the arithmetic of a model's forward pass, as manifests of references name it."""
    config = get_model_config(model[0])
    precision = config.params_dtype
    for kind in ("fp8", "fp4"):
        if getattr(config, kind, None):
            recipe = getattr(config, f"{kind}_recipe")
            recipe = getattr(recipe, "value", recipe)  # Megatron's enumeration, or text
            # as `scoring.precision` names them
            precision = {"tensorwise": "fp8", "mxfp8": "mxfp8"}.get(recipe, f"{kind} {recipe}")
            break
    return precision_name(precision, over=config.params_dtype)


def _metrics_to_log(row: dict[str, Any]) -> dict[str, float]:
    """Returns a row for the host's loggers, which have the trainer's own metrics already."""
    return {name: v for name, v in known_metrics(row).items() if not name.startswith("host/")}
