"""The blocks that a training loop of plain PyTorch trains on, chosen at every step.

Shape suffixes: K = blocks of a step over all replicas, B = blocks of a batch, S = tokens per block.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from nemo_rod.corpus.store import BlockStore
from nemo_rod.hosts.job_policy import job_policy, multiplier_of, refuse_if
from nemo_rod.hosts.job_record import JobRecord, job_header, refuse_nameless, segments
from nemo_rod.hosts.plain_torch.scorer import TorchScorer
from nemo_rod.hosts.plain_torch.training_losses import TrainingLosses
from nemo_rod.hosts.plain_torch.updates import Updates
from nemo_rod.ranks import refuse_different_choices
from nemo_rod.selection import Candidates, Choice, OnNonfinite, Policy, References, Selector
from nemo_rod.selection.candidates import Pools
from nemo_rod.selection.curriculum.header import MOST
from nemo_rod.selection.dealing import deal
from nemo_rod.selection.held_out import HELD_OUT, is_due, source_losses
from nemo_rod.selection.policies import TakeAll, observes


class RoDBatches:
    """Iterates over the batches of this process; a step's are chosen when its first is requested.

    Each step takes `batch_size / (micro_batch_size * replicas)` batches, whose gradients the loop
    adds up. A batch has the arguments of a causal language model of transformers: `input_ids` and
    `labels` of whole blocks, int64 `[B, S]`, on the model's device.

    The iterator must not be read ahead of the optimizer, or blocks are scored with old weights:
    give it to the loop as it is, not through `accelerator.prepare` or a `DataLoader`. A loop whose
    updates do not fall between two steps is refused at the first that shows it.

    Args:
        model: the model that the loop trains: a causal language model of Hugging Face, possibly
            wrapped in `DistributedDataParallel` or sharded by FSDP2 (`fully_shard`).
        store: the store that holds the blocks.
        references: reference losses of the store, for the length that is to be scored; None for a
            policy that needs no scores.
        steps: number of optimizer steps.
        batch_size: blocks trained on in one step, over all replicas (K).
        micro_batch_size: blocks of a batch (B); by default one batch a step.
        scoring_micro_batch_size: blocks in one forward pass of scoring; by default as a batch.
        policy: chooses the blocks, or its name (a registered one, or FILE.py:NAME); by default
            `Joint()`.
        pools: candidates of every step; by default `Candidates` of the store with their defaults.
        on_nonfinite: treatment of a score that is not finite, "refuse" or "exclude".
        held_out: store of blocks that are not trained on, such as that of the split "holdout", on
            whose first blocks of every source held-out losses are measured at the start and at the
            end; None for none.
        validation_every: further steps after which held-out losses are measured; 0 for none.
        out: folder of the record, written by the first rank; None for no record. Files of a run
            that began before are kept as `curriculum.rod.1` and so on.
        group: process group of the replicas; by default all processes, if there are several.

    Attributes:
        next_step: the step of the next batch; a checkpoint must keep it (`state_dict`).
        choice: the choice of the last step.

    Raises:
        ValueError: the model, store, references, sizes or pools do not fit each other.

    Example:
        >>> store = BlockStore("runs/legal/blocks")
        >>> references = References.open(["references/legal", "references/base"], store)
        >>> batches = RoDBatches(model, store, references, steps=100, batch_size=32, out="rod")
        >>> for batch in batches:
        ...     loss = model(**batch).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     batches.end_step({"train/loss": loss.item()})
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: BlockStore,
        references: References | None = None,
        *,
        steps: int,
        batch_size: int,
        micro_batch_size: int | None = None,
        scoring_micro_batch_size: int | None = None,
        policy: Policy | str | None = None,
        pools: Pools | None = None,
        on_nonfinite: OnNonfinite = "refuse",
        held_out: BlockStore | None = None,
        validation_every: int = 0,
        out: str | Path | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        steps, batch_size = map(operator.index, (steps, batch_size))  # also of NumPy's types
        self.store, self.references, self.steps = store, references, steps
        length = references.length if references else None
        self.scorer = TorchScorer(model, store, micro_batch_size=1, length=length, group=group)
        replicas = self.scorer.replicas
        if held_out is not None and not hasattr(held_out, "digest"):
            raise ValueError(
                f"held_out is a {type(held_out).__name__}, expected one BlockStore: each of its "
                "sources is measured, so prepare several validation sets as sources of one."
            )
        own = batch_size // replicas if micro_batch_size is None else micro_batch_size
        size = own if scoring_micro_batch_size is None else scoring_micro_batch_size
        self.micro_batch_size, self.scorer.micro_batch_size = own, size
        counts = {"num_adaptation": store.num_adaptation, "num_replay": store.num_replay}
        fitting: dict[str, Any] = {**counts, "batch_size": batch_size}
        measures = held_out is not None and validation_every != 0
        policy, files = job_policy(policy, on_nonfinite, validation_every, measures=measures)
        pools = pools or Candidates(**fitting, multiplier=multiplier_of(policy))
        is_foreign = isinstance(pools, Candidates) and not fitting.items() <= vars(pools).items()
        refuse_if(
            (own < 1 or batch_size % (own * replicas),
             f"batch_size is {batch_size}, expected a multiple of micro_batch_size={own} x "
             f"{replicas} replicas: change one of the three."),
            (steps < 1, f"steps is {steps}, expected at least 1 optimizer step."),
            (size < 1, f"scoring_micro_batch_size is {size}, expected at least 1 block."),
            (is_foreign,
             f"the pools are of other blocks or batches: expected Candidates with {fitting}."),
            (pools.size < batch_size, f"the pools have {pools.size} candidates, expected at least "
             f"the {batch_size} blocks of a batch."),
            (references and any(each.store != store.digest for each in references.manifests),
             f"the references are of other blocks than those in {store.root}: open them with "
             "References.open(folders, store)."),
            (held_out and held_out.tokenizer_fingerprint != store.tokenizer_fingerprint,
             f"the held-out blocks in {held_out and held_out.root} are of another tokenizer than "
             f"those in {store.root}: prepare both with the model's."),
            (held_out and held_out.digest == store.digest,
             f"the held-out blocks are those in {store.root} that are trained on: give "
             "BlockStore(..., split='holdout')."),
        )  # fmt: skip
        refuse_nameless(pools, "pools")
        self._policy = (policy, files)  # as given, and the digests of its files
        self._batches_per_step = batch_size // (own * replicas)
        self.selector = Selector(
            pools=pools,
            policy=policy,
            store=store,
            batch_size=batch_size,
            references=references,
            on_nonfinite=on_nonfinite,
            seed=_seed_of(pools),
            steps=steps,
        )
        watched = (self.scorer, self._batches_per_step)
        self._losses = TrainingLosses(*watched) if observes(policy) else None
        self.held_out, self.validation_every = held_out, validation_every
        if held_out is not None:
            self._validator = TorchScorer(model, held_out, micro_batch_size=size, group=group)
        self.out = None if out is None else Path(out)
        self.next_step, self._learned, self._is_open = 0, 0, False  # learned: steps
        self.choice: Choice | None = None
        self._record: JobRecord | None = None  # of the first rank
        self._updates: Updates | None = None  # of all iterators of a loop
        self._began: float | None = None  # when the step under way began; None between steps

    # What libraries ask of a loader of which they skip batches, as Trainer does when it resumes: a
    # dataset of whole batches.
    batch_size, drop_last, prefetch_factor = None, False, None

    @property
    def dataset(self) -> IterableDataset:
        """All batches from step 0 on, of which those before `next_step` are only placeholders."""
        return _FromTheStart(self)

    def __len__(self) -> int:
        """Returns the number of batches of all steps in this process."""
        return self.steps * self._batches_per_step

    def __getitem__(self, index: int) -> Any:
        """Refuses a `DataLoader`, which would index a dataset."""
        raise TypeError(
            "RoDBatches has batches in the order of training alone, each after the last update: "
            "give them to the loop as they are, without a DataLoader."
        )

    def state_dict(self) -> dict[str, int]:
        """Ends the step and returns the state for a checkpoint.

        One rank may call it alone. A step that it ends has no held-out losses, for which
        `end_step` must be called before.

        Example:
            >>> torch.save({"batches": batches.state_dict()}, "checkpoint.pt")
        """
        self.end_step(measures=False)
        return {"step": self.next_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues after the step of a checkpoint; later steps of the record are dropped.

        Raises:
            ValueError: the state is of no step of these batches.

        Example:
            >>> batches.load_state_dict(torch.load("checkpoint.pt")["batches"])
        """
        step = state.get("step") if isinstance(state, Mapping) else None
        if type(step) is not int or not 0 <= step <= self.steps:
            raise ValueError(
                f"the state {state!r:.60} is of no step of these {self.steps}: give what "
                "`state_dict` returned in a run of as many steps, or of fewer."
            )
        self.next_step, self._is_open, self._updates = step, False, None

    def end_step(
        self, metrics: Mapping[str, float] | None = None, *, measures: bool = True
    ) -> None:
        """Writes the metrics of the step that was trained on, before a checkpoint names it.

        It is called by itself when the next batch is asked for, and does nothing if the step has
        ended or some of its batches are still to come. Collective over the replicas if held-out
        losses are measured.

        Args:
            metrics: further metrics of the step, such as `{"train/loss": 2.1}`, in nats per token.
            measures: whether held-out losses are measured if they are due.

        Example:
            >>> batches.end_step({"train/loss": 2.1, "train/lr": 1e-5})
        """
        choice = self.choice
        if self._began is None or choice is None or choice.pool.step >= self.next_step:
            return
        total, self._began = time.perf_counter() - self._began, None
        loss_K = self._losses.take() if self._losses else None
        if choice.is_pending and loss_K is None:
            raise ValueError(
                f"step {choice.pool.step} ended before the model was called with all of its "
                "batches, labels included: train on every batch that the iterator yields."
            )
        choice = self.choice = self.selector.learn(choice, loss_K)
        done = self._learned = choice.pool.step + 1
        losses, row = dict[str, float](), dict[str, Any]()
        if measures and is_due(done, every=self.validation_every, steps=self.steps):
            losses = self._held_out_losses()
        if self._record is not None:
            row = self._record.end_step(choice, total, {**(metrics or {}), **losses})
        if losses:
            self.selector.tell_policy(row, self.scorer.from_first)

    def _held_out_losses(self) -> dict[str, float]:
        """Measures with the current weights. Collective over the replicas."""
        if self.held_out is None:
            return {}
        sources = [row for row in self.held_out.sources if row.count]
        return source_losses(self._validator, sources, num_blocks=HELD_OUT)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the batches of this process, from `next_step` on. Collective over the replicas.

        Raises:
            ValueError: a score is not finite, replicas chose different blocks, the record is of
                another run, the weights were not updated once for the batches of a step, or a
                worker of a `DataLoader` asks, which has another copy of the model.
        """
        if get_worker_info() is not None:
            raise ValueError(
                "The batches are read in a worker process of a DataLoader, whose copy of the model "
                "is never trained: set num_workers=0, or give the loop the batches as they are."
            )
        if self._is_open and self.next_step == self.steps:
            self._is_open = False  # said once
            print(
                f"nemo-rod: all {self.steps} steps of RoDBatches are done, and it has no more: "
                "set the trainer's number of steps, over which the learning rate decays, to "
                f"{self.steps} (Trainer's max_steps), or give more steps to RoDBatches.",
                file=sys.stderr,
            )
        if self._updates is None:
            self._updates = Updates(self.scorer.model, batches=self._batches_per_step)
        updates = self._updates
        while self.next_step < self.steps:
            self._began, step = time.perf_counter(), self.next_step
            updates.refuse_between(step)
            self.choice = choice = self._choose(step)
            updates.note_weights(step)
            size, replicas = self.micro_batch_size, self.scorer.replicas
            shares = deal(choice.block_ids, micro_batch_size=size, replicas=replicas)
            own = shares[self.scorer.rank].reshape(-1, size)
            try:
                for number, block_ids in enumerate(own, start=1):
                    if number > 1:
                        updates.refuse_within()
                    tokens = torch.from_numpy(self.store.checked_tokens(block_ids))
                    tokens_BS = tokens.to(self.scorer.device).long()
                    updates.done = number
                    if number == len(own):  # a checkpoint after it continues with the next step
                        self.next_step = step + 1
                    yield {"input_ids": tokens_BS, "labels": tokens_BS.clone()}
            except BaseException:  # perhaps of this rank alone
                self.end_step(measures=False)
                self._is_open = self.next_step > step  # else the step is recorded anew
                raise
            self.end_step()
        updates.refuse_between(self.steps)

    def _choose(self, step: int) -> Choice:
        """Chooses and records the blocks of a step, the same ones on every rank."""
        selector, scorer = self.selector, self.scorer
        if not self._is_open:
            is_new, self._is_open = scorer.from_first(lambda: self._open(step)), True
            losses = self._held_out_losses() if is_new else {}
            if losses and self._record is not None:
                self._record.begin(losses)
            goes_on = self.out is None and self._learned == step
            find = partial(segments, self.out, self.store.digest, step)
            known = 0 if goes_on else selector.resume(step, find, scorer.from_first)
            if known and not isinstance(selector.policy, TakeAll):  # which learns nothing
                self._is_open = False
                raise ValueError(
                    f"{type(selector.policy).__name__} learns from every step, but those before "
                    f"step {known} are not recorded in out={self.out}: continue with the folder "
                    "that has their record, or begin at step 0."
                )
            self._began = time.perf_counter()
        choice = selector.choose(step, scorer)
        if self.references is not None and choice.loss is not None:
            self.references.refuse_other_precision(scorer.precision)
        if scorer.replicas > 1:
            refuse_different_choices(choice, scorer.group)
        if self._record is not None:
            self._record.begin_step(choice)
        return choice

    def _open(self, step: int) -> bool:
        """Opens the record of the first rank; returns whether no earlier step is recorded."""
        selector, (policy, files), length = self.selector, self._policy, self.scorer.length
        pools: Any = selector.pools
        # the header has the sizes, which may change in between
        drawn = (pools.balance, pools.retention) if isinstance(pools, Candidates) else pools
        decided_by = (policy, drawn, length, *files)
        self._record = JobRecord(
            self.out,
            job_header(selector, self.store, decided_by=decided_by, seed=selector.seed),
            step=step,
            steps=self.steps,
            held_out=self.held_out.digest if self.held_out else "",
            scored_length=length,
        )
        return self._record.is_new


def _seed_of(pools: Any) -> int:
    """Returns the seed of pools, also of NumPy's types; refuses one that no record can have."""
    seed = getattr(pools, "seed", 0)
    if not (hasattr(seed, "__index__") and 0 <= seed < MOST):
        raise ValueError(
            f"the pools have the seed {seed!r}, expected a whole number in [0, 2**48)."
        )
    return operator.index(seed)


class _FromTheStart(IterableDataset):
    def __init__(self, batches: RoDBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor] | _Done]:
        batches = self.batches
        per_step = len(batches) // batches.steps
        yield from repeat(_Done(per_step), per_step * batches.next_step)
        yield from batches


class _Done:
    """Stands for a batch of a step before `next_step`, and refuses to be trained on."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step

    def __iter__(self) -> Any:
        raise ValueError(
            "A batch of a step that is done was not skipped: the loop resumes with another number "
            f"of batches to an update than the {self.per_step} of a step (Trainer's "
            f"gradient_accumulation_steps={self.per_step})."
        )

    def __contains__(self, name: object) -> bool:
        return name in iter(self)

    def keys(self) -> Any:
        return iter(self)
