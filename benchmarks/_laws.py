"""The arms of recipe=german_smollm2_135m_laws in plain PyTorch, one after another on one GPU.

For a model of 135 M parameters, launching a kernel takes longer than running it, so its layers are
compiled and every arm trains in this one process. Blocks, choices, references and losses are those
of `nemo_rod`: the store of `nemo-rod prepare`, `RoDBatches`, `TorchScorer`.

    python benchmarks/_laws.py RUN --out results [--english STORE] [--seeds 42 43 44] [--until FILE]

RUN has `blocks/` and `model/`. `results.json` in the output has a row for every arm and
`losses.npz` the loss of every held-out block, `<arm>/<seed>` and `<arm>/<seed>/english`, in the
order of the store; both are written again after every arm. What was measured before is not
measured again. Before each arm, FILE is read for the time (seconds since 1970) by which it must
end; an arm that cannot is left out.

Shape suffixes: B = blocks of a micro-batch, S = tokens, T = S - 1 targets, H = hidden size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, linear

from nemo_rod import (
    BlockStore,
    Candidates,
    Curriculum,
    FixedShare,
    Joint,
    References,
    RoDBatches,
    TakeAll,
)
from nemo_rod.config import Optimisation
from nemo_rod.hosts.plain_torch import TorchScorer
from nemo_rod.hosts.plain_torch.write_references import weights_digest
from nemo_rod.lab.composing import compose_config
from nemo_rod.selection.candidates import retention_for_share
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, replay_share
from nemo_rod.selection.mix import Mix
from nemo_rod.selection.policies import observes
from nemo_rod.selection.references.folder import role_manifest
from nemo_rod.selection.references.reference_pass import write_references

RECIPE = "recipe=german_smollm2_135m_laws"
FIXED = ("fixed_8", "fixed_5", "fixed_12", "fixed_20")
# of every seed; those of the first two seeds come before any of a third
FIRST = ("no_replay", "rod", *FIXED, "fixed_like_rod")
SECOND = ("schedule_like_rod", "rod_averages", "source_like_rod", "no_replay_third_lr")
LOOKS = (41, 82)  # steps of no_replay after which held-out losses are measured, too
SCORED = 64  # blocks of a scoring pass
COST = {"rod": 1.6}  # in plain arms; a guess, until one is measured


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(folder: Path, *, weights: bool = True) -> Any:
    """Returns the model in fp32, its layers compiled; with random weights if there are none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch._dynamo.config.recompile_limit = 64
    config = AutoConfig.from_pretrained(folder)
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if weights:
        load(model, folder)
    if os.environ.get("COMPILED", "1") == "1":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model.train()


def load(model: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors", device=str(device()))
    absent = model.load_state_dict(state, strict=False)
    assert not absent.unexpected_keys and set(absent.missing_keys) <= {"lm_head.weight"}, absent


def bf16() -> Any:
    return torch.autocast(device().type, torch.bfloat16)


def _loss(hidden_BTH: torch.Tensor, weight: torch.Tensor, target_BT: torch.Tensor) -> Any:
    return cross_entropy(linear(hidden_BTH, weight).float().flatten(0, 1), target_BT.flatten())


_compiled_loss: Callable[..., Any] = torch.compile(_loss, dynamic=False)


def batch_loss(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of blocks, nats per token; the logits are never whole in fp32."""
    hidden = model.model(input_ids=tokens_BS, use_cache=False).last_hidden_state
    function = _compiled_loss if os.environ.get("COMPILED", "1") == "1" else _loss
    return function(hidden[:, :-1], model.lm_head.weight, tokens_BS[:, 1:])


def learning_rate(o: Optimisation, step: int) -> float:
    """Warm-up, constant, cosine decay, as in the recipe; the step counts from 0."""
    left = o.steps - step
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    if left > o.decay:
        return o.lr
    down = 0.5 * (1 + math.cos(math.pi * (1 - left / o.decay)))
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * down)


def train(
    model: Any, batches: RoDBatches, o: Optimisation, look: Callable[[int], None]
) -> list[float]:
    """Trains on all batches and returns the training loss of every step."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    betas = (o.adam_beta1, o.adam_beta2)
    optimizer = torch.optim.AdamW(
        groups, o.lr, betas, o.adam_eps, o.weight_decay, fused=device().type == "cuda"
    )
    passes, parts, means = o.batch_size // batches.micro_batch_size, [], list[torch.Tensor]()
    learns = observes(batches.selector.policy)  # from losses of the model's own output
    with bf16():
        for batch in batches:
            tokens = batch["input_ids"]
            loss = model(**batch).loss if learns else batch_loss(model, tokens)
            (loss / passes).backward()
            parts.append(loss.detach())
            if len(parts) < passes:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(o, len(means))
            optimizer.step()
            optimizer.zero_grad()
            means.append(torch.stack(parts).mean())
            parts.clear()
            look(len(means))
    return [float(mean) for mean in means]


class Laws:
    """All arms of all seeds, and what has been measured of them."""

    def __init__(self, run: Path, out: Path, *, model: Any, english: Path | None, **options: Any):
        self.run, self.out, self.model = run, out, model
        self.recipe = compose_config(RECIPE, *options.pop("overrides", []))
        self.train: Optimisation = self.recipe.train
        self.micro_batch_size: int = options.pop("micro_batch_size", self.train.micro_batch_size)
        self.until: Callable[[], float] = options.pop("until", lambda: math.inf)
        self.store = BlockStore(run / "blocks")
        self.held_out = BlockStore(run / "blocks", split="holdout")
        self.english = BlockStore(english) if english else None
        self.base = {name: value.clone() for name, value in model.state_dict().items()}
        self.rows: list[dict[str, Any]] = []
        self.losses: dict[str, np.ndarray] = {}
        self.plain_seconds = 0.0  # of an arm without scoring, measured last
        out.mkdir(parents=True, exist_ok=True)
        self.facts = {
            "store": self._sources(self.store),
            "held_out": self._sources(self.held_out),
            "english": self._sources(self.english) if self.english else [],
            "model": weights_digest(model), "device": self._device_name(),
            "torch": torch.__version__, "micro_batch_size": self.micro_batch_size, **options,
        }  # fmt: skip

    @staticmethod
    def _sources(store: BlockStore) -> list[Any]:
        return [store.digest, *([s.name, s.role, s.start, s.count] for s in store.sources)]

    @staticmethod
    def _device_name() -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    # What is measured

    def measure(self, name: str, seed: int, **row: Any) -> None:
        """Adds an arm's held-out losses and its row, and writes all of them."""
        begin = time.monotonic()
        english = None if "_at_" in name else self.english
        for suffix, store in (("", self.held_out), ("/english", english)):
            if store is None:
                continue
            scorer = TorchScorer(self.model, store, micro_batch_size=SCORED)
            ids = np.resize(np.arange(len(store)), -(-len(store) // SCORED) * SCORED)
            with bf16():
                self.losses[f"{name}/{seed}{suffix}"] = scorer.losses(ids)[: len(store)]
        loss = {
            source.name: float(self.losses[f"{name}/{seed}"][source.start :][: source.count].mean())
            for source in self.held_out.sources
        }
        evaluation = round(time.monotonic() - begin, 2)
        self.rows.append({"arm": name, "seed": seed, "loss": loss, **row, "evaluation": evaluation})
        results = {**self.facts, "train": vars(self.train), "arms": self.rows}
        part = self.out / "results.json.part"
        part.write_text(json.dumps(results, indent=1))
        os.replace(part, self.out / "results.json")
        with (self.out / "losses.npz.part").open("wb") as file:
            np.savez_compressed(file, **self.losses)  # type: ignore[arg-type]
        os.replace(self.out / "losses.npz.part", self.out / "losses.npz")
        shown = {key: round(value, 4) for key, value in loss.items()}
        print(f"{time.time():.0f} {name} {seed} {shown} share {row.get('share')} "
              f"seconds {row.get('seconds')}", flush=True)  # fmt: skip

    # What is trained

    def arm(self, name: str, seed: int) -> None:
        """Trains an arm from the base and measures it."""
        o, folder = self.train, self.out / "arms" / f"{name}_{seed}"
        if name.endswith("third_lr"):
            o = Optimisation(**{**vars(o), "lr": o.lr / 3})
        self.restore()
        batches = self.batches(name, seed, folder)

        def look(step: int) -> None:
            if name == "no_replay" and step in LOOKS:
                self.measure(f"{name}_at_{step}", seed, share=0.0)

        begin = time.monotonic()
        losses = train(self.model, batches, o, look)
        seconds = time.monotonic() - begin
        if name in FIXED or name == "no_replay":
            self.plain_seconds = seconds
        elif name == "rod" and self.plain_seconds:
            COST["rod"] = seconds / self.plain_seconds
        with Curriculum.open(folder / "curriculum.rod", read_only=True) as curriculum:
            index = curriculum.header.source_index
            trained = [record.trained_on for record in curriculum]
            counts = [np.bincount(index(ids), minlength=len(self.store.sources)) for ids in trained]
            share = replay_share(curriculum)
        self.measure(
            name, seed, share=share, seconds=round(seconds, 1), steps=o.steps, lr=o.lr,
            counts=np.array(counts).tolist(), train_loss=[round(x, 4) for x in losses],
        )  # fmt: skip
        if name == "no_replay":
            self.reference("specialist", seed, f"specialist_{seed}")

    def restore(self) -> None:
        with torch.no_grad():
            for key, value in self.model.state_dict().items():
                value.copy_(self.base[key])

    def reference(self, kind: str, seed: int, name: str) -> None:
        """Writes the present model's losses on the blocks that RoD can draw."""
        role = {"specialist": "adaptation", "base": "replay"}[kind]
        scorer = TorchScorer(self.model, self.store, micro_batch_size=SCORED)
        drawn = self.candidates(seed, 2).drawn(self.train.steps)
        drawn |= role == "replay"  # for every seed
        with bf16():
            scorer.losses(np.arange(SCORED))  # to learn the precision
            manifest = role_manifest(
                self.store, role, model=weights_digest(self.model), lengths=[scorer.length],
                precision=scorer.precision,
            )  # fmt: skip
            write_references(
                scorer, self.out / "references" / name, manifest=manifest, name=name,
                required=drawn[manifest.start : manifest.stop], agree=scorer.from_first,
            )  # fmt: skip

    def candidates(self, seed: int, multiplier: float, share: float | None = None) -> Candidates:
        """Balanced pools, or a corpus stream with a share of replay."""
        counts = self.store.num_adaptation, self.store.num_replay
        more: dict[str, Any] = {"balance": "exact"}
        if share is not None:
            more = {"balance": "corpus", "retention": retention_for_share(share, *counts)}
        return Candidates(
            num_adaptation=counts[0], num_replay=counts[1], batch_size=self.train.batch_size,
            multiplier=multiplier, seed=seed, **more,
        )  # fmt: skip

    def batches(self, name: str, seed: int, out: Path) -> RoDBatches:
        recorded = self.out / "arms" / f"rod_{seed}" / "curriculum.rod"
        pools: Any = self.candidates(seed, 2)
        policy: Any = TakeAll()
        references = None
        if name.startswith("rod"):
            policy = Mix("specialist") if name == "rod_averages" else Joint()
            folders = [self.out / "references" / name for name in (f"specialist_{seed}", "base")]
            references = References.open(folders, self.store)
        elif name == "fixed_like_rod":
            with Curriculum.open(recorded, read_only=True) as curriculum:
                policy = FixedShare(replay_share(curriculum))
        elif name in ("schedule_like_rod", "source_like_rod"):
            by: Any = "source" if name == "source_like_rod" else "role"
            curriculum = Curriculum.open(recorded, read_only=True)
            pools = _Followed(pools, curriculum, by=by, store=self.store)
        else:
            share = float(name[6:]) / 100 if name.startswith("fixed_") else 0.0
            pools = self.candidates(seed, 1, share)
        return RoDBatches(
            self.model, self.store, references, steps=self.train.steps,
            batch_size=self.train.batch_size, micro_batch_size=self.micro_batch_size,
            scoring_micro_batch_size=SCORED, policy=policy, pools=pools, out=out,
        )  # fmt: skip

    def go(self, seeds: list[int], only: list[str] | None = None) -> None:
        """Measures the base and trains everything that ends in time."""
        self.restore()
        self.measure("base", 0)
        self.reference("base", seeds[0], "base")
        early, late = seeds[:2], seeds[2:]
        queue = [("no_replay", seed) for seed in early]
        queue += [(name, seed) for seed in early for name in FIRST[1:]]
        queue += [(name, seed) for name in SECOND[:2] for seed in early]
        queue += [(name, seed) for seed in late for name in FIRST]
        queue += [(name, seed) for name in SECOND[2:] for seed in early]
        queue += [(name, seed) for name in SECOND[:3] for seed in late]
        for name, seed in queue:
            if only and name not in only:
                continue
            left = self.until() - time.time()
            needed = self.plain_seconds * COST.get(name, 1.03) + 3
            if left < needed:
                print(
                    f"{name} {seed} is left out: {left:.0f} s are left of {needed:.0f}", flush=True
                )
                continue
            try:
                self.arm(name, seed)
            except Exception:
                print(f"{name} {seed} failed:\n{traceback.format_exc()}", flush=True)
                torch.cuda.empty_cache()


class _Followed(FollowedPools):
    """With a representation, by which a record recognises it."""

    def __repr__(self) -> str:
        return f"as many by {self._by} as {self._curriculum.path}"


def speeds(
    model: Any, sizes: tuple[int, ...], *, length: int = 1024
) -> Iterator[tuple[int, float]]:
    """Yields micro-batch sizes and the tokens that a second of training on them takes."""
    vocabulary, wait = model.config.vocab_size, getattr(torch, device().type).synchronize
    for size in sizes:
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds = []
            for _ in range(6):
                tokens = torch.randint(vocabulary, (size, length), device=device())
                wait()
                begin = time.perf_counter()
                with bf16():
                    batch_loss(model, tokens).backward()
                wait()
                seconds.append(time.perf_counter() - begin)
                model.zero_grad()
            yield size, size * length / float(np.median(seconds[2:]))
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="has blocks/ and model/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--english", type=Path, help="a store of which losses are measured, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--until", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", help="keys of the recipe, such as train.steps=4")
    o = parser.parse_intermixed_args()
    more: dict[str, Any] = {"overrides": o.overrides}
    if o.until:
        more["until"] = lambda: float(o.until.read_text())
    if o.micro_batch_size:
        more["micro_batch_size"] = o.micro_batch_size
    laws = Laws(o.run, o.out, model=build(o.run / "model"), english=o.english, **more)
    laws.go(o.seeds, o.arms)


if __name__ == "__main__":
    main()
