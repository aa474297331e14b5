"""What one would do instead of RoD: the terms of a loss against plain PyTorch, in layouts.

The oracle trains transformers' model in one process, with torch's own AdamW, on the blocks that the
run has recorded, and with autograd's gradient of the whole loss.
"""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
from places import WORKERS

torch = pytest.importorskip("torch")

from architectures import tensors  # noqa: E402
from test_resume import assert_same_run  # noqa: E402
from tiny import LAYOUTS, metric, prepare_beginning, write_beginning  # noqa: E402

from nemo_rod.checkpoints.losses import load  # noqa: E402
from nemo_rod.corpus import BlockStore  # noqa: E402
from nemo_rod.selection import Curriculum  # noqa: E402

STEPS = 6
JOBS: dict[str, tuple[str, dict[str, float]]] = {
    "l2_dp2_distopt": ("dp2_distopt", {"l2_base": 5.0}),
    "kl_dp2": ("dp2", {"kl_base": 2.0}),
    "kl_tp2": ("tp2", {"kl_base": 2.0}),
    "both_tp2_sp": ("tp2_sp", {"kl_base": 1.0, "l2_base": 1.0}),
    "sfa_dp2_distopt": ("dp2_distopt", {"sfa": 4.0}),
    "sfa_tp2": ("tp2", {"sfa": 4.0}),
    "lora_dp2": ("dp2", {"lora": 4.0}),
    "lora_tp2_sp": ("tp2_sp", {"lora": 4.0}),
}
FAST = [name for name in JOBS if "tp2" not in name]
OTHERS = [name for name in JOBS if name not in FAST]
F = torch.nn.functional


@pytest.fixture(scope="module")
def trained(tmp_path_factory, torchrun):
    """The folder of some jobs, trained one after the other on two processes."""
    root = tmp_path_factory.mktemp("alternatives")
    prepare_beginning(root)

    @functools.cache
    def run(*names: str) -> Path:
        torchrun(2, WORKERS / "jobs_worker.py", *(write(root, name) for name in names), timeout=600)
        return root

    return run


def write(root: Path, name: str) -> Path:
    (layout, terms), arm, selecting = JOBS[name], "fixed_40", {}
    if name == "kl_dp2":  # a policy that is told the losses of training, without the term
        arm, selecting = "rod", {"multiplier": 2, "balance": "expected", "kappa": 1.0}
        selecting["policy_name"] = "odm"
    train = {"steps": STEPS, "lr": 1e-3, "warmup_fraction": 0.1, "terms": terms}
    keys = {"checkpoint__every": STEPS // 2, "validation__every": 0, "selecting": selecting}
    return write_beginning(root, name, train, arm, parallel=LAYOUTS[layout], **keys)


def by_hand(root: Path, run: Path, terms: dict[str, float]) -> dict[str, torch.Tensor]:
    """The weights after the steps of a run, by plain arithmetic."""
    model, base = load(root / "init").train(), load(root / "init")
    start = {name: weight.detach().clone() for name, weight in base.named_parameters()}
    adapted = adapters(run) if "lora" in terms else {}
    leaves = [leaf for pair in adapted.values() for leaf in pair] or [*model.parameters()]
    leaves = [*dict.fromkeys(leaves)]  # matrices that Megatron fuses share their first adapter
    matrices = [w for w in leaves if w.dim() > 1]
    vectors = [w for w in leaves if w.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    store, rates = BlockStore(root / "blocks"), metric(run, "train/lr")
    for record in Curriculum.open(run / "curriculum.rod", read_only=True):
        ids = record.block_ids[record.chosen]
        tokens = torch.from_numpy(store.tokens(ids).astype(np.int64))
        replay = torch.from_numpy(store.is_replay(ids))
        assert replay.any() and not replay.all()
        weights = {name: start[name] + b @ a for name, (a, b) in adapted.items()}
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": tokens}).logits
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])
        if "kl_base" in terms:
            with torch.no_grad():
                before = base(input_ids=tokens[replay]).logits[:, :-1].log_softmax(-1)
            now = logits[replay, :-1].log_softmax(-1)
            divergence = (before.exp() * (before - now)).sum()
            loss = loss + terms["kl_base"] * divergence / tokens[:, 1:].numel()
        for name, weight in model.named_parameters():
            if "l2_base" in terms:
                loss = loss + terms["l2_base"] / 2 * (weight - start[name]).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rates[record.step]
        optimizer.step()
        optimizer.zero_grad()
        if "sfa" in terms and (record.step + 1) in (terms["sfa"], STEPS):
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_((weight + start[name]) / 2)
    merged = {name: start[name] + b @ a for name, (a, b) in adapted.items()}
    return {name: w.detach() for name, w in {**dict(model.named_parameters()), **merged}.items()}


def adapters(run: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The adapters that a run began with, by the name of their weight: A [rank, in], B [out, rank].

    Every B is zero.
    """
    fused = {
        "self_attention.linear_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "self_attention.linear_proj": ["self_attn.o_proj"],
        "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.linear_fc2": ["mlp.down_proj"],
    }
    shards = [torch.load(file) for file in sorted(run.glob("adapters_*.pt"))]
    if "tp2" not in run.name:  # the others are replicas
        del shards[1:]
    found, base = {}, load(run.parent / "init")
    for name in (name for name in shards[0] if name.endswith("linear_in.weight")):
        assert not any(shard[name.replace("linear_in", "linear_out")].any() for shard in shards)
        layer, part = name.removeprefix("decoder.layers.").split(".", 1)
        part = part.removesuffix(".adapter.linear_in.weight")
        is_split_by_input = part.endswith(("proj", "fc2"))
        first = torch.cat([shard[name] for shard in shards], dim=int(is_split_by_input))
        first.requires_grad_()
        for own in fused[part]:
            weight = base.get_parameter(f"model.layers.{layer}.{own}.weight")
            last = torch.zeros(len(weight), len(first), requires_grad=True)
            found[f"model.layers.{layer}.{own}.weight"] = first, last
    assert len(found) == 7 * len(base.model.layers)
    return found


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.layouts) for name in OTHERS)]
)
def test_terms_train_as_plain_arithmetic(trained, name):
    root, terms = trained(*(FAST if name in FAST else OTHERS)), JOBS[name][1]
    weights = {n: w.float() for n, w in tensors(root / name / "hf").items()}
    error = apart(by_hand(root, root / name, terms), weights)
    assert error < 2e-5
    for left_out in terms:  # each of them is seen
        fewer = {n: w for n, w in terms.items() if n != left_out}
        assert apart(by_hand(root, root / name, fewer), weights) > 20 * error


@pytest.mark.layouts
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["both_tp2_sp", "sfa_tp2", "lora_tp2_sp"])
def test_a_resumed_run_keeps_near_the_base_and_not_near_its_checkpoint(
    trained, torchrun, tmp_path, name
):
    run = trained(*OTHERS) / name
    whole = Path(shutil.copytree(run, tmp_path / "whole"))
    shutil.rmtree(run / "hf")
    shutil.rmtree(run / "checkpoints" / f"iter_{STEPS:07d}")
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(STEPS // 2))
    torchrun(2, WORKERS / "jobs_worker.py", run.with_name(f"{run.name}.json"), timeout=600)
    assert_same_run(whole, run, steps=STEPS)
