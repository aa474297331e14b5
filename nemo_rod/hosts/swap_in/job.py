"""The part common to all hosts: the user's options, and the selector built from them for a job.

A host's `install` creates a `SelectingJob`, passes the trainer's training data to `built`, and
replaces the schedule of every training step by `around(...)`. `nemo_rod.hosts.swap_in.install`
describes the options.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rod.files import digest
from nemo_rod.hosts.job_record import JobRecord
from nemo_rod.hosts.logger_runs import known_metrics
from nemo_rod.hosts.swap_in import MULTIPLIER
from nemo_rod.hosts.swap_in.job_data import (
    HeldOut,
    JobData,
    JobPools,
    JobReferences,
    losses_and_mask,
)
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles
from nemo_rod.megatron.batches import Batch
from nemo_rod.megatron.ranks import all_or_none, from_recorder, is_recorder, peak_memory
from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.selection import Choice, CurriculumHeader, Joint, Policy, References, Selector
from nemo_rod.selection.competition import number
from nemo_rod.upstream.functions import check

INSTALLED = "_nemo_rod"  # attribute that marks the selector in a trainer


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

    Args:
        host: name of the host.
        replaceable: objects of which a replacement of ours has the attribute `INSTALLED`.

    Raises:
        ValueError: a function differs or is missing, or a selector is already installed.
    """
    if any(hasattr(item, INSTALLED) for item in replaceable):
        raise ValueError(
            "A selector, or reference(...), is installed already: uninstall() it before the next "
            "one, or start the script once for each."
        )
    check("scoring", f"swap_in/{host}")


def train_blend(blend: Any, per_split: Any) -> Any:
    """Returns the blend of a job's train split, of two forms to give it; None if it names none."""
    return blend or (per_split[0] if per_split else None)


_RESIZES = "changes the size of the pools"
# Settings that selection does not work with, by the name that they have on every host, and why not.
_UNSUPPORTED = {
    **dict.fromkeys(("use_megatron_fsdp", "use_torch_fsdp2"), "is not supported yet"),
    "sft": "packs samples of many lengths into a row",
    "inter_document_masking": "packs documents into a row",
    "dataloader_inter_document_masking": "packs documents into a row",
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


def refuse_job(
    sections: Mapping[str, Any],
    *features: tuple[Any, str, str, str],
    blend: Sequence[Any] | None,
    roles: Roles,
) -> None:
    """Refuses a job that selection does not support.

    Args:
        sections: objects with the job's settings, by the prefix of their names: `dataset.`, or `--`
            for arguments of a command line.
        features: for each further unsupported feature whether the job has it, its setting, the
            reason, and the cure.
        blend: the paths of the job's sources, with their weights or in a tuple with them; None if
            not known yet.
        roles: see `roles.py`.

    Raises:
        ValueError: the job is not supported; the message names the setting, the reason and the
            cure.
    """
    refused = [feature[1:] for feature in features if feature[0]]
    for prefix, section in sections.items():
        is_argument = prefix == "--"
        for name, reason in _UNSUPPORTED.items():
            if value := getattr(section, name, None):
                setting = prefix + (name.replace("_", "-") if is_argument else name)
                is_switch = value is True and not is_argument
                cure = f"set {setting}=False" if is_switch else "leave it out"
                refused.append((setting, reason, cure))
        loader = getattr(section, "dataloader_type", None)
        if loader in _LOADERS:
            setting = f"{prefix}dataloader_type="
            shown, cure = f"{setting}{loader!r}", f"set {setting}'single'"
            if is_argument:
                shown, cure = f"--dataloader-type {loader}", "use single"
            refused.append((shown, _LOADERS[loader], cure))
    for setting, reason, cure in refused:
        raise ValueError(f"Selection does not work with {setting}: it {reason}; {cure}.")
    if blend is not None:
        assign_roles(blend[0], roles)


class Job:
    """A job that draws m times the samples it trains on, to select or to write references.

    A host passes it the job's data (`watch_data`, or `built`), and puts `around` in the place of
    the schedule of every training step, which `ended` follows.

    Attributes:
        data: the job's training data; None until it is built.
        out: folder of what is written.
        unused: keys of the job's samples that its forward step does not read; see `JobData`.

    Raises:
        ValueError: the multiplier is not a number of at least 1.
    """

    unused: Collection[str] = ()

    def __init__(
        self, *, roles: Roles, multiplier: float = MULTIPLIER, out: str | Path | None = None
    ) -> None:
        if not (isinstance(multiplier, int | float) and 1 <= multiplier < math.inf):
            raise ValueError(f"multiplier={multiplier!r} is not valid: expected a number >= 1.")
        self.roles, self.multiplier = roles, multiplier
        self.out = None if out is None else Path(out)
        self.data: JobData | None = None

    def write_to(self, checkpoints: str | Path | None) -> None:
        """Sets the folder, unless the user has, beside the job's checkpoints if it saves any."""
        if self.out is None and checkpoints is not None:
            self.out = Path(checkpoints) / "rod"

    def candidates(self, num_trained: int, batch_size: int) -> int:
        """Returns how many samples are drawn for a number of trained ones, K in a step."""
        return -(-num_trained * round(self.multiplier * batch_size) // batch_size)

    def built(
        self,
        train: Any,
        valid: Any,
        *,
        num_drawn: int,
        batch_size: int,
        seed: int,
        steps: int,
        every: int | None,
    ) -> None:
        """Takes the job's data once it is built, and again if the job restarts.

        Args:
            train: the training dataset; see `JobData`.
            valid: the validation dataset; None without one.
            num_drawn: samples that the job draws in all.
            batch_size: samples trained on in one step (K).
            seed: seed of the job's data.
            steps: steps of the whole job.
            every: steps between two validations of the job itself.

        Raises:
            ValueError: the roles, or the references, belong to other data.
        """
        self.data = JobData(train, self.roles, num_samples=num_drawn, unused=self.unused)

    def watch_data(
        self, installed: Installed, trainer: Any, facts: Callable[[], dict[str, Any]]
    ) -> None:
        """Makes a Megatron trainer draw m times the training samples, and takes its data.

        With virtual pipeline stages the trainer builds the same data once per stage.

        Args:
            installed: handle of the replacements.
            trainer: module with the trainer's functions that count and build the data.
            facts: function that returns further arguments of `built`, before the data is built.
        """
        count = trainer.get_train_valid_test_num_samples
        build = trainer.build_train_valid_test_datasets
        drawn = 0

        def count_candidates(*args: Any) -> tuple[int, int, int]:
            nonlocal drawn
            train, valid, test = count(*args)
            drawn = self.candidates(train, facts()["batch_size"])
            return drawn, valid, test

        def build_and_pass_on(*args: Any, **kwargs: Any) -> tuple:
            datasets = build(*args, **kwargs)  # it counts first
            self.built(*datasets[:2], num_drawn=drawn, **facts())
            return datasets

        installed.replace(trainer, "get_train_valid_test_num_samples", count_candidates)
        installed.replace(trainer, "build_train_valid_test_datasets", build_and_pass_on)

    def around(self, schedule: Callable, *, step: int, groups: Any, consumed: int) -> Callable:
        """Returns the replacement for one training step's schedule.

        Args:
            schedule: the host's forward-backward function.
            step: number of the training step, from 0.
            groups: Megatron's process groups.
            consumed: samples that the job has trained on before this step.
        """
        raise NotImplementedError

    def ended(self, metrics: dict[str, Any]) -> None:
        """Ends the step whose schedule was the last. Collective.

        Args:
            metrics: what the host knows of the step, on the recording rank.
        """

    def selecting(
        self, train_step: Callable, place: Callable[[dict[str, Any]], tuple[int, Any, int]]
    ) -> Callable:
        """Returns the replacement for a trainer's `train_step`.

        Args:
            train_step: the trainer's function, whose `forward_backward_func` is replaced.
            place: function that returns, from the arguments of a call by name, the number of the
                step, from 0, Megatron's process groups, and the samples consumed before.
        """
        signature = inspect.signature(train_step)

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            step, groups, consumed = place(call)
            call["forward_backward_func"] = self.around(
                call["forward_backward_func"], step=step, groups=groups, consumed=consumed
            )
            lr = learning_rate(call["optimizer"])
            result = train_step(**call)
            losses, *_, grad_norm = result[:6]  # the losses on the last pipeline stage alone
            numbers = {"train/loss": losses.get("lm loss"), "train/grad_norm": grad_norm}
            self.ended({name: number(n) for name, n in numbers.items()} | {"train/lr": lr})
            return result

        setattr(rod_train_step, INSTALLED, True)
        return rod_train_step


class SelectingJob(Job):
    """A job with the selector installed.

    Attributes:
        logs_elsewhere: whether the host's loggers write on another rank than the recording one.
        held_out: what its held-out losses are measured on; None for none.

    Raises:
        ValueError: the multiplier or the references cannot be used.
    """

    logs_elsewhere = False

    def __init__(
        self,
        *,
        references: Sequence[str | Path] = (),
        policy: Policy | None = None,
        validation_every: int | None = None,
        **data: Any,
    ) -> None:
        super().__init__(**data)
        self.policy: Policy = Joint() if policy is None else policy
        self.references, self.validation_every = references, validation_every
        name, scores = type(self.policy).__name__, self.policy.needs_scores
        is_count = type(validation_every) is int and validation_every >= 0
        for refused, sentence in (
            (validation_every is not None and not is_count,
             f"validation_every={validation_every!r} is not valid: expected a number of steps, 0 "
             "for no held-out losses, or None for the job's own interval."),
            (type(self.policy).__repr__ is object.__repr__,
             f"{name} has no __repr__, by which a resumed job recognises its policy: make it a "
             "dataclass."),
            (scores and not references,
             f"{name} chooses by reducible loss: give the folders of reference losses as "
             "'references', or policy=TakeAll() with multiplier=1."),
            (not scores and self.multiplier > 1,
             f"{name} uses no scores, so multiplier={self.multiplier} would draw samples in vain: "
             "set multiplier=1."),
        ):  # fmt: skip
            if refused:
                raise ValueError(sentence)
        if references:
            References.open(references)  # refuses missing or damaged ones before the job starts
        self.held_out: HeldOut | None = None
        self._record: JobRecord | None = None  # of the recording rank
        self._is_open = False
        self._call: dict[str, Any] = {}  # what the last schedule was called with

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows metrics after `done` steps in the host's loggers; called where `is_logging`."""

    def is_logging(self) -> bool:
        """Returns whether the host's loggers write on this rank."""
        return is_recorder()

    def around_scoring(self) -> AbstractContextManager:
        """Returns a context in which the host preserves state that its forward step changes."""
        return nullcontext()

    def built(self, train: Any, valid: Any, **job: Any) -> None:
        """Takes the data, and builds the selector; see `Job.built`."""
        super().built(train, valid, **job)
        data, batch_size, self._steps = self.data, job["batch_size"], job["steps"]
        assert data is not None
        self._record, self._is_open = None, False
        self._pools = JobPools(data, round(self.multiplier * batch_size))
        references = None
        if self.references:
            try:
                references = JobReferences.open(self.references, data)
            except ValueError as error:
                raise ValueError(
                    f"{error}. References of a job are valid only for its blend, roles, seed, "
                    "sample length, masks, number of steps and multiplier."
                ) from None
        self._header = CurriculumHeader(
            num_candidates=self._pools.size,
            num_chosen=batch_size,
            block_size=data.block_size,
            store=data.digest,
            tokenizer=data.tokenizer_fingerprint,
            references=references.digest if references else "",
            config=digest(repr(self.policy).encode()),
            seed=job["seed"],
            sources=data.sources,
            scored=self.policy.needs_scores,
        )
        self._rod = RoDSelector(
            Selector(
                pools=self._pools,
                policy=self.policy,
                batch_size=batch_size,
                references=references,
            ),
            data,
            scoring_micro_batch_size=0,  # as in training
            batches=data.micro_batches,
            checked_batches=partial(
                data.micro_batches, compare=references.of_content if references else None
            ),
            scoring_step=losses_and_mask,
            around_scoring=self.around_scoring,
        )
        self._rod.on_choice = self._chosen
        asked = self.validation_every
        every = job["every"] if asked is None else asked
        try:
            if asked != 0:
                self.held_out = HeldOut(valid, self.roles, every=every or 0, unused=self.unused)
        except ValueError as error:
            reason = (
                f"No held-out losses can be measured: {str(error).removesuffix('.')}; give the "
                "job a validation split of sources with roles, or set validation_every=0."
            )
            if asked is not None:
                raise ValueError(reason) from None
            if is_recorder():
                print(f"nemo-rod: {reason}", file=sys.stderr, flush=True)

    def around(self, schedule: Callable, *, step: int, groups: Any, consumed: int) -> Callable:
        """Returns the replacement for one training step's schedule; see `Job.around`.

        The first call opens the files at that step, and its schedule compares the samples that the
        job's own iterator would have trained on with those of the same places in its data.

        Raises:
            ValueError: the files belong to another run, or the job reads its data in another order;
                raised on all ranks.
        """
        self._began = time.perf_counter()
        select = self._step = self._rod.around(schedule, step=step, groups=groups)
        is_first, is_new = not self._is_open, False
        if is_first:
            batch_size = self._rod.selector.batch_size
            self._pools.begin(step, consumed=consumed, batch_size=batch_size)
            is_new = self._open(step)

        def watched(**options: Any) -> Any:
            nonlocal is_new
            if options["forward_only"]:
                return schedule(**options)
            names = ("model", "forward_step_func", "micro_batch_size")
            self._call = {name: options[name] for name in names} | {"groups": groups}
            if is_first:
                iterators = options["data_iterator"]
                chunks = iterators if isinstance(iterators, list) else [iterators]
                count, size = options["num_microbatches"], options["micro_batch_size"]
                for chunk in chunks:
                    check = partial(self._compare_order, chunk, consumed, count, size, groups.dp)
                    all_or_none(check)
                losses = self._held_out_losses() if is_new else {}
                is_new = False  # where the trainer runs every step again
                if losses and self._record is not None:
                    self._record.begin(losses)
                if losses and self.is_logging():
                    self.log(step, _shown(losses))
                self._began = time.perf_counter()
            return select(**options)

        return watched

    def ended(self, metrics: dict[str, Any]) -> None:
        """Records the step, and measures held-out losses; see `Job.ended`."""
        choice, total = self._step.ended(), time.perf_counter() - self._began
        if choice is None:
            return
        done, row = choice.pool.step + 1, {}
        if self.held_out and self.held_out.is_due(done, self._steps):
            metrics = metrics | self._held_out_losses()
        if self._record is not None:
            row = self._record.ended(choice, total, metrics | peak_memory())
        if self.logs_elsewhere:
            row = from_recorder(lambda: row)
        if self.is_logging():
            self.log(done, _shown(row))

    def _chosen(self, choice: Choice) -> None:
        if self._record is not None:
            self._record.chosen(choice)

    def _open(self, step: int) -> bool:
        """Opens the record; returns whether no earlier step is recorded. Collective."""

        def opened() -> JobRecord | None:
            if not is_recorder():
                return None
            content = self.held_out.content() if self.held_out else ""
            return JobRecord(self.out, self._header, step=step, steps=self._steps, held_out=content)

        self._record, self._is_open = all_or_none(opened), True
        return from_recorder(lambda: self._record is not None and self._record.is_new)

    def _held_out_losses(self) -> dict[str, float]:
        """Measures with the current weights; empty for a job without held-out data. Collective."""
        if self.held_out is None:
            return {}
        with self.around_scoring():
            return self.held_out.losses(**self._call)

    def _compare_order(
        self, iterator: Any, consumed: int, count: int, size: int, replicas: Any
    ) -> None:
        """Refuses a job whose iterator does not read its data from the first sample on."""
        assert self.data is not None
        if iterator is None:  # a rank that reads no data
            return
        places, _ = self.data.pool(consumed, count * size * replicas.size())
        own = places.reshape(count, replicas.size(), size)[:, replicas.rank()].ravel()
        for place, batch in enumerate(self.data.micro_batches(own, size)):
            read: Batch = next(iterator, {})
            if not read or any(
                torch.is_tensor(value) and not torch.equal(value.cpu(), batch[name])
                for name, value in read.items()
                if name in batch
            ):
                raise ValueError(
                    f"The job's own iterator does not read samples {consumed} and following of its "
                    f"data in order (micro-batch {place} of replica {replicas.rank()} differs): "
                    "selection finds samples by their place; use Megatron's sequential sampler, "
                    "dataloader_type='single', without packing."
                )


def _shown(row: dict[str, Any]) -> dict[str, float]:
    """Returns a row for the host's loggers, which have the trainer's own metrics already."""
    return {name: v for name, v in known_metrics(row).items() if not name.startswith("host/")}


def learning_rate(optimizer: Any) -> float | None:
    """Returns the rate of an optimizer's next step; None if it holds no weights on this rank."""
    return next((group["lr"] for group in optimizer.param_groups if group), None)
