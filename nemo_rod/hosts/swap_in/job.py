"""The part common to all hosts: the user's options, and the selector built from them for a job.

A host's `install` creates a `SelectingJob`, passes the trainer's training data to `built`, and
replaces the schedule of every training step by `around(...)`. `nemo_rod.hosts.swap_in.install`
describes the options.

Shape suffix: C = candidates of all replicas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.files import digest
from nemo_rod.hosts.swap_in import MULTIPLIER
from nemo_rod.hosts.swap_in.blend import Blend
from nemo_rod.hosts.swap_in.host_selector import StreamSelector
from nemo_rod.hosts.swap_in.roles import Roles, assign_roles
from nemo_rod.hosts.swap_in.step_record import ChoiceRecord
from nemo_rod.selection import Choice, CurriculumHeader, Joint, Policy, References
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
        blend: the job's training data; None until it is built.

    Raises:
        ValueError: the multiplier is not an integer of at least 1.
    """

    def __init__(self, *, roles: Roles, multiplier: int = MULTIPLIER) -> None:
        if not isinstance(multiplier, int) or multiplier < 1:
            raise ValueError(
                f"multiplier={multiplier!r} is not valid: expected a whole number >= 1, as a job's "
                "iterators give whole micro-batches."
            )
        self.roles, self.multiplier = roles, multiplier
        self.blend: Blend | None = None
        self._train_sets: list[Any] = []

    def candidates(self, num_trained: int) -> int:
        """Returns how many samples are drawn for a number of trained ones."""
        return num_trained * self.multiplier

    def built(
        self, train: Any, *, num_drawn: int, dataloader_type: str, batch_size: int, seed: int
    ) -> None:
        """Takes the job's training data once it is built, and again if the job restarts.

        Args:
            train: the dataset; see `Blend`.
            num_drawn: samples that the job draws in all.
            dataloader_type: the order in which it draws them; Megatron's name.
            batch_size: samples trained on in one step (K).
            seed: seed of the job's data.

        Raises:
            ValueError: the roles, or the references, belong to other data.
        """
        self._train_sets.append(train)
        in_order = dataloader_type == "single"  # else it draws from all samples
        self.blend = Blend(train, self.roles, num_samples=num_drawn if in_order else len(train))

    def watch_data(self, installed: Installed, trainer: Any, built: Callable[[Any], None]) -> None:
        """Makes a Megatron trainer draw m times the training samples, and takes its training data.

        With virtual pipeline stages the trainer builds the same data once per stage.

        Args:
            installed: handle of the replacements.
            trainer: module with the trainer's functions that count, build and load the data.
            built: function that passes a built training dataset on to `Job.built`.
        """
        count = trainer.get_train_valid_test_num_samples
        build = trainer.build_train_valid_test_datasets
        load = trainer.build_pretraining_data_loader
        load_signature = inspect.signature(load)

        def count_candidates(*args: Any) -> tuple[int, int, int]:
            train, valid, test = count(*args)
            return self.candidates(train), valid, test

        def build_and_pass_on(*args: Any, **kwargs: Any) -> tuple:
            datasets = build(*args, **kwargs)
            built(datasets[0])
            return datasets

        def load_from_candidates(*args: Any, **kwargs: Any) -> Any:
            call = load_signature.bind(*args, **kwargs)
            if any(call.arguments["dataset"] is train for train in self._train_sets):
                consumed = call.arguments["consumed_samples"]
                call.arguments["consumed_samples"] = self.candidates(consumed)
            return load(*call.args, **call.kwargs)

        installed.replace(trainer, "get_train_valid_test_num_samples", count_candidates)
        installed.replace(trainer, "build_train_valid_test_datasets", build_and_pass_on)
        installed.replace(trainer, "build_pretraining_data_loader", load_from_candidates)


class SelectingJob(Job):
    """A job with the selector installed.

    Attributes:
        unused: keys of the job's batches that its forward step does not read, such as an S x S
            mask that the model computes itself; they are not passed on.

    Raises:
        ValueError: the multiplier or the references cannot be used.
    """

    unused: Collection[str] = ()

    def __init__(
        self,
        *,
        references: Sequence[str | Path] = (),
        policy: Policy | None = None,
        out: str | Path | None = None,
        **data: Any,
    ) -> None:
        super().__init__(**data)
        self.policy: Policy = Joint() if policy is None else policy
        self.references, self.out = references, None if out is None else Path(out)
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
        self.selector: StreamSelector | None = None
        self.record: ChoiceRecord | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a step's metrics where the host shows its own; called on the recording rank."""

    def around_scoring(self) -> AbstractContextManager:
        """Returns a context in which the host preserves state that its forward step changes."""
        return nullcontext()

    def built(self, train: Any, *, batch_size: int, seed: int, **drawn: Any) -> None:
        """Takes the job's training data and builds the selector for it; see `Job.built`."""
        super().built(train, batch_size=batch_size, seed=seed, **drawn)
        assert self.blend is not None
        references = None
        if self.references:
            try:
                references = References.open(self.references, self.blend)
            except ValueError as error:
                raise ValueError(
                    f"{error}. References of a job are valid only for its blend, roles, seed, "
                    "sample length, masks, number of steps and multiplier."
                ) from None
        header = None
        if references is not None:
            header = CurriculumHeader(
                num_candidates=self.candidates(batch_size),
                num_chosen=batch_size,
                block_size=self.blend.block_size,
                store=self.blend.digest,
                tokenizer=self.blend.tokenizer_fingerprint,
                references=references.digest,
                config=digest(repr(self.policy).encode()),
                seed=seed,
                sources=self.blend.sources,
                scored=self.policy.needs_scores,
            )
        self.record = ChoiceRecord(self.out, self.blend, header)
        self.selector = StreamSelector(
            blend=self.blend,
            policy=self.policy,
            multiplier=self.multiplier,
            references=references,
            record=self._record_choice,
            unused=self.unused,
            around_scoring=self.around_scoring,
        )

    def around(self, schedule: Callable, *, step: int, groups: Any) -> Callable:
        """Returns the replacement for one training step's schedule; see `StreamSelector.around`.

        The first call opens the files at that step, which is collective.

        Raises:
            ValueError: the files belong to another run; raised on all ranks.
        """
        assert self.selector is not None and self.record is not None, "no data yet"
        self.record.begin(step)
        return self.selector.around(schedule, step=step, groups=groups)

    def selecting(
        self, train_step: Callable, place: Callable[[dict[str, Any]], tuple[int, Any]]
    ) -> Callable:
        """Returns the replacement for a trainer's `train_step`.

        Args:
            train_step: the trainer's function; its `forward_backward_func` will select first.
            place: function that returns, from the arguments of a call by name, the number of the
                step, from 0, and Megatron's process groups.
        """
        signature = inspect.signature(train_step)

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            step, groups = place(call)
            call["forward_backward_func"] = self.around(
                call["forward_backward_func"], step=step, groups=groups
            )
            return train_step(**call)

        setattr(rod_train_step, INSTALLED, True)
        return rod_train_step

    def _record_choice(self, choice: Choice, source_C: np.ndarray) -> None:
        assert self.record is not None
        metrics = self.record(choice, source_C)
        if metrics:
            defined = {name: value for name, value in metrics.items() if value is not None}
            self.log(choice.pool.step, defined)
