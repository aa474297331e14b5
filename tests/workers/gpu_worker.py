"""What holds of scoring and of a step on whatever device there is: a CPU, a GPU or two.

torchrun ... tests/workers/gpu_worker.py OUT {"size": "tiny", ...} BODY [BODY ...]

Every body is a function of this file. It returns what it found as plain values, which are written
to OUT/<body>.json; `test_gpu.py` compares them with what must hold. A body that fails ends the
others.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _one_gpu as one
from _made_up import make_references, make_store
from _memory import peak_beyond

from nemo_rod.corpus import BlockStore
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.scoring.training_losses import TrainingLosses
from nemo_rod.selection import References, Selector
from nemo_rod.selection.arms import make_arm

BATCH = 8


@dataclass(frozen=True)
class Case:
    """Where and how large: `folder` has the store and its references."""

    folder: Path
    groups: Any
    size: str
    vocabulary: int
    length: int
    blocks: int
    dtype: torch.dtype
    layers: str
    tensor: int
    large_vocabulary: int
    large_length: int
    options: dict[str, Any]
    spoil: bool = False  # does what the comparisons must find

    @property
    def store(self) -> BlockStore:
        return BlockStore(self.folder / "blocks")

    def model(self, **changes: Any) -> Any:
        options = {**self.options, **changes.pop("options", {})}
        given = {
            "size": one.SIZES[self.size], "vocabulary": self.vocabulary, "length": self.length,
            "dtype": self.dtype, "layers": self.layers, "tensor": self.tensor, **changes,
        }  # fmt: skip
        return one.make_model(given.pop("size"), **given, **options)

    def scorer(self, model: Any, store: BlockStore | None = None, **options: Any) -> MegatronScorer:
        options = {"micro_batch_size": 4, **options}
        return MegatronScorer([model], store or self.store, self.groups, **options)

    def pool(self, count: int = 4 * BATCH) -> np.ndarray:
        return np.random.default_rng(3).choice(len(self.store), count, replace=False)

    def selector(self, name: str) -> Selector:
        store = self.store
        counts = {"num_adaptation": store.num_adaptation, "num_replay": store.num_replay}
        rod = {"multiplier": 2, "balance": "expected", "kappa": 1.0} if name == "rod" else {}
        arm = make_arm(name, **counts, batch_size=BATCH, seed=5, **rod)
        references = [self.folder / "references" / role for role in ("adaptation", "replay")]
        return Selector.for_arm(arm, store, References.open(references, store))


def losses(case: Case) -> dict[str, Any]:
    """Losses of a pool and the ids chosen from it; OUT/losses.npz of two devices are compared."""
    model = case.model()
    selector = case.selector("rod")
    choice = selector.choose(0, case.scorer(model))
    loss_C = case.scorer(model).losses(case.pool())
    scores, ids = choice.score, choice.block_ids
    np.savez(
        case.folder / f"losses_{model_device(model)}.npz", losses=loss_C, scores=scores, ids=ids
    )
    return {"device": model_device(model), "finite": bool(np.isfinite(loss_C).all())}


def again(case: Case) -> dict[str, Any]:
    """The same call twice; and with other numbers of blocks in a micro-batch."""
    model = case.model()
    first, second = (case.scorer(model).losses(case.pool()) for _ in range(2))
    per_token = {}
    for size in (1, 2, 8):
        other = case.scorer(model, micro_batch_size=size).losses(case.pool())
        per_token[size] = float(np.abs(other - first).max())
    return {"same": bool((first == second).all()), "moves": per_token}


def prefixes(case: Case) -> dict[str, Any]:
    """Largest difference of prefixes from the same parts of whole blocks, nats per token."""
    model, lengths = case.model(), [case.length // n for n in (1, 2, 4, 8)]
    cut = case.scorer(model).losses_at(case.pool(), lengths)
    moves = {}
    for column, length in enumerate(lengths[1:], 1):
        alone = case.scorer(model, length=length).losses(case.pool())
        moves[length] = float(np.abs(alone - cut[:, column]).max())
    return {"moves": moves}


def as_in_training(case: Case) -> dict[str, Any]:
    """Largest difference of scores from the losses of a training step, nats per token."""
    model, ids = case.model(), case.pool(BATCH)
    training = one.Training(model, case.store, case.groups, micro_batch_size=2)
    scored = case.scorer(model, micro_batch_size=2).losses(ids)
    training_losses = TrainingLosses(training.forward_step, case.groups)
    replicas, rank = case.groups.dp.size(), case.groups.dp.rank()
    training.plain(ids.reshape(-1, 2)[rank::replicas].ravel(), training_losses.forward_step)
    return {"moves": float(np.abs(scored - training_losses.gather(BATCH, 2)).max())}


def leaves_no_trace(case: Case) -> dict[str, Any]:
    """Names of what a scoring pass changed, of a model that drops out units when it trains."""
    model = case.model(options={"hidden_dropout": 0.1, "attention_dropout": 0.1})
    training = one.Training(model, case.store, case.groups, micro_batch_size=2)
    training.plain(case.pool(BATCH))
    before = training.state()
    MegatronScorer(
        training.chunks, case.store, case.groups, micro_batch_size=4
    ).losses(case.pool())  # fmt: skip
    if case.spoil:
        torch.rand(1)
    after = training.state()
    modes = [module.training for chunk in training.chunks for module in chunk.modules()]
    return {"changed": differences(before, after), "training": all(modes)}


def take_all(case: Case) -> dict[str, Any]:
    """What differs between a step of an arm that takes its whole pool and a stock step."""
    return _against_stock(case, "max_replay")


def rod(case: Case) -> dict[str, Any]:
    """What differs between RoD's steps and stock steps on the blocks that RoD chose."""
    return _against_stock(case, "rod")


def fp8_scoring(case: Case) -> dict[str, Any]:
    """Scores in FP8 beside the model's own; and the same comparison of steps as `rod`."""
    model = case.model()
    own = case.scorer(model).losses(case.pool())
    low = case.scorer(model, precision="fp8").losses(case.pool())
    back = case.scorer(model).losses(case.pool())
    moves = _against_stock(case, "rod", precision="fp8")
    ranks = [np.argsort(np.argsort(values)) for values in (own, low)]
    return {
        **moves,
        "other scores": bool((own != low).any()),
        "moves": float(np.abs(own - low).max()),
        "rank correlation": float(np.corrcoef(*ranks)[0, 1]),
        "own again": bool((own == back).all()),
    }


def overlap(case: Case) -> dict[str, Any]:
    """How scores move when tensor-parallel products overlap with their communication."""
    from transformer_engine.pytorch import UserBufferQuantizationMode, initialize_ub

    plain = case.scorer(case.model()).losses(case.pool())
    shape = [4 * case.length, one.SIZES[case.size].hidden]  # tokens of a micro-batch
    modes = [UserBufferQuantizationMode.NONE]
    initialize_ub(
        shape=shape, tp_size=case.tensor, quantization_modes=modes, bootstrap_backend="nccl"
    )
    model = case.model(options={"tp_comm_overlap": True})
    overlapped = case.scorer(model).losses(case.pool())
    return {"moves": float(np.abs(overlapped - plain).max())}


def memory(case: Case) -> dict[str, Any]:
    """GiB that scoring one block with a large vocabulary needs beside the weights."""
    length = case.large_length
    store = make_store(case.folder / "large", length=length, blocks=2)
    model = case.model(vocabulary=case.large_vocabulary, length=length)
    scorer = case.scorer(model, store, micro_batch_size=1)
    ids = np.zeros(1, dtype=np.int64)
    scorer.losses(ids[:1])  # kernels that are chosen at the first call
    with peak_beyond() as peak:
        scorer.losses(ids)
    whole = 4 * length * case.large_vocabulary / one.GIB
    return {"gib": peak[0], "all logits gib": whole}


def _against_stock(case: Case, arm: str, precision: str | None = None) -> dict[str, Any]:
    from nemo_rod.megatron.rod_selector import RoDSelector

    ends, chosen, ended = [], [], []
    for kind in ("ours", "stock"):
        one.tensor_parallel.model_parallel_cuda_manual_seed(11, force_reset_rng=True)
        torch.manual_seed(11)
        model = case.model(options={"hidden_dropout": 0.1, "attention_dropout": 0.1})
        training = one.Training(model, case.store, case.groups, micro_batch_size=2)
        options = {} if precision is None else {"scoring_precision": precision}
        ours = RoDSelector(case.selector(arm), case.store, scoring_micro_batch_size=4, **options)
        ours.on_choice = lambda choice: chosen.append(choice.block_ids)
        step = ours.wrap(training.train_step)
        for number in range(3):
            if kind == "ours":
                training.rod(step, number, BATCH)
            else:
                replicas, rank = case.groups.dp.size(), case.groups.dp.rank()
                ids = chosen[-1 - number if case.spoil else number]
                dealt = ids.reshape(-1, 2)[rank::replicas].ravel()
                training.plain(dealt)
        ends.append(training.state())
        ended.append(case.scorer(model).losses(case.pool()))
    begin = case.scorer(case.model()).losses(case.pool())
    return {
        "differs": differences(*ends),
        "same losses": bool((ended[0] == ended[1]).all()),
        "trained": bool((ended[0] != begin).all()),
        "steps": len(chosen),
    }


def differences(one_state: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of states that are not equal to the bit."""
    assert one_state.keys() == other.keys()
    assert one_state["weights"] and one_state["optimizer"]
    return [
        name
        for name, values in one_state.items()
        if len(values) != len(other[name])
        or not all(torch.equal(a, b) for a, b in zip(values, other[name], strict=True))
    ]


def model_device(model: Any) -> str:
    return next(model.parameters()).device.type


@contextmanager
def exact() -> Iterator[None]:
    """Without TF32, and with kernels that give the same bits every time."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # the memory-efficient backward pass adds up in any order
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield


BODIES: dict[str, Callable[[Case], dict[str, Any]]] = {
    body.__name__: body
    for body in (
        losses, again, prefixes, as_in_training, leaves_no_trace, take_all, rod, fp8_scoring,
        overlap, memory,
    )
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    out, values, bodies = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    values["dtype"] = getattr(torch, values["dtype"])
    options = values.pop("options", {})
    groups = one.start(values["tensor"])
    if dist.get_rank() == 0 and not (out / "blocks").exists():
        store = make_store(out / "blocks", length=values["length"], blocks=values["blocks"])
        make_references(out / "references", store)
    dist.barrier()
    case = Case(folder=out, groups=groups, options=options, **values)
    with exact():
        for name in bodies:
            outcome = BODIES[name](replace(case))
            if dist.get_rank() == 0:
                (out / f"{name}.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
