"""Two tensor-parallel ranks that do not agree; each prints the outcome.

torchrun ... tests/workers/ranks_worker.py
"""

import json
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

STEP, BLOCK_SIZE = 3, 64


class OwnRank:
    """A policy by which every rank chooses another candidate."""

    needs = frozenset()

    def select(self, pool: Any, score: None, count: int) -> np.ndarray:
        return np.array([dist.get_rank()])


class TwoCandidates:
    size = 2

    def pool(self, step: int) -> Any:
        from nemo_rod.selection import Pool

        return Pool(step, np.array([5, 8]), np.array([False, True]))


def chosen_one_ulp_apart(groups: Any) -> list[int]:
    """What is chosen of four blocks with one loss, of which rank 1 finds the last one dearer."""
    from nemo_rod.megatron.scoring.scorer import on_every_rank
    from nemo_rod.selection import Joint, Pool
    from nemo_rod.selection.choice import choose

    losses = torch.ones(4, 1)
    if groups.tp.rank() == 1:
        losses[3] = torch.nextafter(losses[3], torch.tensor(2.0))
    loss = on_every_rank([losses], 4, 1, groups).flatten().numpy()
    pool = Pool(STEP, np.arange(4), np.zeros(4, dtype=bool))
    return choose(pool, Joint(), 2, loss, np.zeros_like(loss)).chosen.tolist()


def model() -> torch.nn.Module:
    """What hosts ask of a model before it is run."""
    from megatron.core.transformer import TransformerConfig

    made = torch.nn.Linear(1, 1)
    made.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    return made


def never(**_: Any) -> None:
    raise AssertionError("trained on it all the same")


def selector() -> Any:
    from nemo_rod.corpus import BlockStore
    from nemo_rod.megatron.rod_selector import RoDSelector
    from nemo_rod.selection import Selector

    store = BlockStore.__new__(BlockStore)  # of no blocks: none is read
    store.block_size = BLOCK_SIZE
    store.source_index, store.sources = lambda ids: np.zeros(len(ids), dtype=np.int64), [None]
    options = {"pools": TwoCandidates(), "policy": OwnRank(), "store": store, "batch_size": 1}
    return RoDSelector(Selector(**options), store)


def own_job(groups: Any) -> None:
    schedule = selector().around(never, step=STEP, groups=groups)
    schedule(forward_only=False, model=[model()], micro_batch_size=1)


def nemo_rl_worker(groups: Any) -> None:
    from nemo_rod.hosts.nemo_rl.worker import RoDWorkerMixin

    worker: Any = RoDWorkerMixin()
    worker.model, worker.train = model(), never
    worker.cfg, worker._rod_selector = {"train_micro_batch_size": 1}, selector()
    worker.rod_step(step=STEP)


def agreed() -> dict[str, Any]:
    """What ranks learn of each other, by no collective whose memory grows with the ranks."""
    from nemo_rod import ranks

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("every rank makes room for the answers of all")

    rank, worked = dist.get_rank(), []
    with patch.object(dist, "all_gather_object", refuse):
        ranks.once_a_node(lambda: worked.append(rank))
        return {
            "result": ranks.from_recorder(lambda: {"rank": rank}),
            "any": ranks.from_all_ranks([f"rank {rank} lacks it"] * rank),
            "all": ranks.on_all_ranks([True, rank == 0, rank == 1]),
            "worked": worked,
            "none fails": ranks.all_or_none(lambda: rank),
            "one fails": refused(lambda: ranks.all_or_none(fails_on_rank_1)),
            "the recorder fails": refused(lambda: ranks.from_recorder(fails_on_rank_1)),
        }


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise OSError(28, "No space left on device", "curriculum.rod")


def refused(function: Any) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    results = {
        "agreed": agreed(),
        "one ulp": chosen_one_ulp_apart(groups),
        "refused": {
            host.__name__: refused(lambda host=host: host(groups))
            for host in (own_job, nemo_rl_worker)
        },
    }
    print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
