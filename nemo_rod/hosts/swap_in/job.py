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
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rod.files import digest
from nemo_rod.hosts.job_record import JobRecord
from nemo_rod.hosts.swap_in import MULTIPLIER
from nemo_rod.hosts.swap_in.held_out import HeldOut
from nemo_rod.hosts.swap_in.job_data import JobData, JobPools, JobReferences
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles
from nemo_rod.loggers import known_metrics
from nemo_rod.megatron.batches import Batch
from nemo_rod.megatron.ranks import all_or_none, from_recorder, is_recorder, peak_memory
from nemo_rod.megatron.rod_selector import ChosenStep, RoDSelector
from nemo_rod.megatron.scoring.scoring_pass import ForwardStep
from nemo_rod.selection import Choice, CurriculumHeader, Joint, Policy, References, Selector
from nemo_rod.selection.curriculum.journal import number
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
        raise ValueError("A selector is installed already: uninstall() it before the next one.")
    check("scoring", f"swap_in/{host}")


def refuse_job(
    features: Iterable[tuple[Any, str, str, str]],
    *,
    sample_length: int,
    length_key: str,
    prefixes: Sequence[str] | None,
    roles: Roles,
) -> None:
    """Refuses a job that selection does not support.

    Args:
        features: for each unsupported feature whether the job has it, its setting, the reason, and
            the cure.
        sample_length: tokens per sample.
        length_key: the host's name of the sample length.
        prefixes: paths of the job's sources, in the blend's order; None if not known yet.
        roles: see `roles.py`.

    Raises:
        ValueError: the job is not supported; the message names the setting, the reason and the
            cure.
    """
    for enabled, feature, reason, cure in features:
        if enabled:
            raise ValueError(f"Selection does not work with {feature}: it {reason}; {cure}.")
    if prefixes is not None:
        assign_roles(prefixes, roles)


class Job:
    """A job that draws m times the samples it trains on, to select or to write references.

    Attributes:
        data: the job's training data; None until it is built.
        unused: keys of the job's samples that its forward step does not read; see `JobData`.

    Raises:
        ValueError: the multiplier is not a number of at least 1.
    """

    unused: Collection[str] = ()

    def __init__(self, *, roles: Roles, multiplier: float = MULTIPLIER) -> None:
        if not (isinstance(multiplier, int | float) and 1 <= multiplier < math.inf):
            raise ValueError(f"multiplier={multiplier!r} is not valid: expected a number >= 1.")
        self.roles, self.multiplier = roles, multiplier
        self.data: JobData | None = None

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
        self,
        installed: Installed,
        trainer: Any,
        built: Callable[[Any, Any], None],
        batch_size: Callable[[], int],
    ) -> None:
        """Makes a Megatron trainer draw m times the training samples, and takes its data.

        With virtual pipeline stages the trainer builds the same data once per stage.

        Args:
            installed: handle of the replacements.
            trainer: module with the trainer's functions that count and build the data.
            built: function that passes the built datasets, for training and validation, on to
                `Job.built`.
            batch_size: function that returns the samples trained on in one step (K).
        """
        count = trainer.get_train_valid_test_num_samples
        build = trainer.build_train_valid_test_datasets

        def count_candidates(*args: Any) -> tuple[int, int, int]:
            train, valid, test = count(*args)
            return self.candidates(train, batch_size()), valid, test

        def build_and_pass_on(*args: Any, **kwargs: Any) -> tuple:
            datasets = build(*args, **kwargs)
            built(*datasets[:2])
            return datasets

        installed.replace(trainer, "get_train_valid_test_num_samples", count_candidates)
        installed.replace(trainer, "build_train_valid_test_datasets", build_and_pass_on)


class SelectingJob(Job):
    """A job with the selector installed.

    Attributes:
        logs_elsewhere: whether the host's loggers write on another rank than the recording one.

    Raises:
        ValueError: the multiplier or the references cannot be used.
    """

    logs_elsewhere = False

    def __init__(
        self,
        *,
        references: Sequence[str | Path] = (),
        policy: Policy | None = None,
        out: str | Path | None = None,
        validation_every: int | None = None,
        **data: Any,
    ) -> None:
        super().__init__(**data)
        self.policy: Policy = Joint() if policy is None else policy
        self.references, self.out = references, None if out is None else Path(out)
        self.validation_every = validation_every
        is_count = type(validation_every) is int and validation_every >= 0
        if validation_every is not None and not is_count:
            raise ValueError(
                f"validation_every={validation_every!r} is not valid: expected a number of steps, "
                "0 for no held-out losses, or None for the job's own interval."
            )
        if type(self.policy).__repr__ is object.__repr__:
            raise ValueError(
                f"{type(self.policy).__name__} has no __repr__, by which a resumed job recognises "
                "its policy: make it a dataclass."
            )
        if self.policy.needs_scores and not references:
            raise ValueError(
                f"{type(self.policy).__name__} chooses by reducible loss: give the folders of "
                "reference losses as 'references', or policy=TakeAll() with multiplier=1."
            )
        if not self.policy.needs_scores and self.multiplier > 1:
            raise ValueError(
                f"{type(self.policy).__name__} uses no scores, so multiplier={self.multiplier} "
                "would draw samples in vain: set multiplier=1."
            )
        if references:
            References.open(references)  # refuses missing or damaged ones before the job starts
        self.pools: JobPools | None = None
        self.selector: RoDSelector | None = None
        self.held_out: HeldOut | None = None
        self.steps = 0  # of the whole job; 0 before its data is known
        self._header: CurriculumHeader | None = None
        self._record: JobRecord | None = None  # of the recording rank
        self._is_open = False
        self._step: ChosenStep | None = None  # the last one
        self._call: dict[str, Any] = {}  # what its schedule was called with
        self._began = 0.0  # when the step under way began

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
        batch_size, seed, self.steps = job["batch_size"], job["seed"], job["steps"]
        self._record, self._is_open = None, False
        assert self.data is not None
        references = None
        if self.references:
            try:
                references = References.open(self.references, self.data)
            except ValueError as error:
                raise ValueError(
                    f"{error}. References of a job are valid only for its blend, roles, seed, "
                    "sample length, masks, number of steps and multiplier."
                ) from None
        data, self.pools = self.data, JobPools(self.data, round(self.multiplier * batch_size))
        self._header = CurriculumHeader(
            num_candidates=self.pools.size,
            num_chosen=batch_size,
            block_size=data.block_size,
            store=data.digest,
            tokenizer=data.tokenizer_fingerprint,
            references=references.digest if references else "",
            config=digest(repr(self.policy).encode()),
            seed=seed,
            sources=data.sources,
            scored=self.policy.needs_scores,
        )
        asked = self.validation_every
        if asked != 0:
            every = job["every"] if asked is None else asked
            try:
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
        by_id = JobReferences(references, data) if references else None
        self.selector = RoDSelector(
            Selector(pools=self.pools, policy=self.policy, batch_size=batch_size, references=by_id),
            data,
            scoring_micro_batch_size=0,  # as in training
            batches=data.micro_batches,
            checked_batches=by_id.checked_batches if by_id else data.micro_batches,
            scoring_step=losses_and_mask,
            around_scoring=self.around_scoring,
        )
        self.selector.on_choice = self._chosen

    def around(self, schedule: Callable, *, step: int, groups: Any, consumed: int) -> Callable:
        """Returns the replacement for one training step's schedule; see `RoDSelector.around`.

        The first call opens the files at that step, and its schedule compares the samples that the
        job's own iterator would have trained on with those of the same places in its data.

        Args:
            schedule: the host's forward-backward function.
            step: number of the training step, from 0.
            groups: Megatron's process groups.
            consumed: samples that the job has trained on before this step.

        Raises:
            ValueError: the files belong to another run, or the job reads its data in another order;
                raised on all ranks.
        """
        assert self.selector is not None and self.pools is not None, "no data yet"
        self._began = time.perf_counter()
        select = self._step = self.selector.around(schedule, step=step, groups=groups)
        is_first, is_new = not self._is_open, False
        if is_first:
            batch_size = self.selector.selector.batch_size
            self.pools.begin(step, consumed=consumed, batch_size=batch_size)
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
                if losses:
                    if self._record is not None:
                        self._record.begin(losses)
                    if self.is_logging():
                        self.log(step, losses)
                self._began = time.perf_counter()
            return select(**options)

        return watched

    def ended(self, metrics: dict[str, Any]) -> None:
        """Records the step whose schedule was the last, and measures held-out losses. Collective.

        Args:
            metrics: what the host knows of the step, on the recording rank.
        """
        assert self._step is not None, "no step yet"
        choice, total = self._step.ended(), time.perf_counter() - self._began
        if choice is None:
            return
        if self.held_out and self.held_out.is_due(choice.pool.step + 1, self.steps):
            metrics = metrics | self._held_out_losses()
        row = {}
        if self._record is not None:
            row = self._record.ended(choice, total, metrics | peak_memory())
        if self.logs_elsewhere:
            row = from_recorder(lambda: row)
        if self.is_logging():
            self.log(choice.pool.step + 1, known_metrics(row))

    def _chosen(self, choice: Choice) -> None:
        if self._record is not None:
            self._record.chosen(choice)

    def _open(self, step: int) -> bool:
        """Opens the record; returns whether no earlier step is recorded. Collective."""

        def opened() -> JobRecord | None:
            if not is_recorder():
                return None
            assert self._header is not None
            digest = self.held_out.digest() if self.held_out else ""
            return JobRecord(self.out, self._header, step=step, steps=self.steps, held_out=digest)

        self._record, self._is_open = all_or_none(opened), True
        return from_recorder(lambda: self._record is not None and self._record.is_new)

    def _held_out_losses(self) -> dict[str, float]:
        """Measures with the current weights; empty for a job without held-out data. Collective."""
        if self.held_out is None:
            return {}
        call = self._call
        with self.around_scoring():
            return self.held_out.losses(
                call["model"],
                call["groups"],
                losses_and_mask(call["forward_step_func"]),
                micro_batch_size=call["micro_batch_size"],
            )

    def _compare_order(
        self, iterator: Any, consumed: int, count: int, size: int, replicas: Any
    ) -> None:
        """Refuses a job whose iterator does not read its data from the first sample on."""
        assert self.data is not None
        if iterator is None:  # a rank that reads no data
            return
        places, _ = self.data.pool(consumed, count * size * replicas.size())
        own = places.reshape(count, replicas.size(), size)[:, replicas.rank()].ravel()
        expected = self.data.micro_batches(own, size)
        for place, batch in enumerate(expected):
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

    def selecting(
        self, train_step: Callable, place: Callable[[dict[str, Any]], tuple[int, Any, int]]
    ) -> Callable:
        """Returns the replacement for a trainer's `train_step`.

        Args:
            train_step: the trainer's function; its `forward_backward_func` will select first.
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


def learning_rate(optimizer: Any) -> float | None:
    """Returns the rate of an optimizer's next step; None if it holds no weights on this rank."""
    return next((group["lr"] for group in optimizer.param_groups if group), None)


def losses_and_mask(forward_step: Callable) -> ForwardStep:
    """Wraps the job's forward step to return token losses and their mask instead of one number.

    Megatron's forward steps bind the mask to the loss function that they return.
    """

    def step(batches: Any, chunk: Any) -> tuple[Any, torch.Tensor]:
        output, loss_function = forward_step(batches, chunk)
        bound = loss_function.args if isinstance(loss_function, partial) else ()
        mask = bound[0] if bound else None
        # before the last pipeline stage the output is no loss, and there may be no mask
        is_loss = torch.is_tensor(output) and output.ndim == 2
        if not bound or (is_loss and getattr(mask, "numel", int)() != output.numel()):
            raise ValueError(
                "The job's forward step does not return functools.partial(loss, loss_mask, ...), "
                "as Megatron's own steps do: selection reads the mask of the losses from its first "
                "argument; return such a partial."
            )
        return output, bound[0]

    return step
