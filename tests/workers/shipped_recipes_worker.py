"""Runs one of Megatron-Bridge's own recipes, shrunk by its keys, with the selector: ROOT FAMILY.

A base of the old corpus, a specialist of the new one, both references, 8 steps that select, and the
last four of them again from the checkpoint behind the fourth. Then, with ROOT FAMILY LAYOUT in two
processes, the job as it is, with TakeAll, and with the steps that select. Prints `SAID {...}`, and
the job's steps are in `steps.jsonl` of ROOT/stock_LAYOUT and ROOT/take_all_LAYOUT.
"""

import importlib
import shutil
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from job_notes import change, say
from swap_in_worker import steps_writer

STEPS, LENGTH = 8, 64
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
PROVIDER = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8,
}  # fmt: skip
MAMBA = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_groups": 2,
}  # fmt: skip
# what Megatron's layers without TransformerEngine, or ours in place of kernels, cannot compute
CPU: dict[str, dict[str, Any]] = {
    "nemotron_h": {"use_mamba_mem_eff_path": True},
    "mamba": {"use_mamba_mem_eff_path": True},
    "gpt_oss": {"add_bias_linear": False},
}
# family -> recipe, class of its Hugging Face configuration if it reads one from the hub, and sizes
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama32": ("llama.h100.llama3:llama32_1b_pretrain_1gpu_h100_bf16_config", "Llama",
                {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("qwen.h100.qwen3:qwen3_600m_pretrain_1gpu_h100_bf16_config", "Qwen3",
              {**SIZES, "tie_word_embeddings": True}),
    "gemma3": ("gemma.h100.gemma3:gemma3_1b_pretrain_1gpu_h100_bf16_config", "",
               {**PROVIDER, "window_size": 16, "vocab_size": 256}),
    "nemotron_h": ("nemotronh.h100.nemotronh:nemotronh_4b_pretrain_1gpu_h100_bf16_config", "",
                   {**PROVIDER, **MAMBA, "hybrid_layer_pattern": "M-M*-", "num_layers": 5}),
    # without attention, which Megatron splits over positions only with TransformerEngine
    "mamba": ("nemotronh.h100.nemotronh:nemotronh_4b_pretrain_1gpu_h100_bf16_config", "",
              {**PROVIDER, **MAMBA, "hybrid_layer_pattern": "M-M-", "num_layers": 4}),
    "deepseek_v2": (
        "deepseek.h100.deepseek_v2:deepseek_v2_lite_pretrain_8gpu_h100_bf16_config",
        "DeepseekV2",
        {
            **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
            "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
            "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": ("gpt_oss.h100.gpt_oss:gpt_oss_20b_pretrain_16gpu_h100_bf16_config", "GptOss",
                {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
}  # fmt: skip
LAYOUTS = {"cp2": {"context_parallel_size": 2}, "ep2": {"expert_model_parallel_size": 2}}


def recipe(family: str) -> Any:
    """The configuration that the recipe's own function returns, with models of small sizes.

    The package of all recipes is not imported, which needs what only those of images do.
    """
    from megatron.bridge import AutoBridge

    place, kind, sizes = FAMILIES[family]
    name = "megatron.bridge.recipes"
    package = types.ModuleType(name)
    package.__path__ = [str(Path(sys.modules["megatron.bridge"].__path__[0], "recipes"))]
    sys.modules[name] = package
    if kind:
        config = getattr(transformers, f"{kind}Config")(**sizes)
        config.architectures = [f"{kind}ForCausalLM"]
        AutoBridge.from_hf_pretrained = classmethod(
            lambda cls, hub, **_: cls.from_hf_config(config)
        )
    module, _, function = place.partition(":")
    cfg = getattr(importlib.import_module(f"{name}.{module}"), function)()
    for key, value in sizes.items() if not kind else ():
        setattr(cfg.model, key, value)
    return cfg


def job(family: str, root: Path, out: str, corpora: list[str], base: str | None) -> Any:
    """The recipe's job on a blend of corpora, for one process without a GPU."""
    from nemo_rod import cpu

    cfg = recipe(family)
    for path, value in {
        "model.seq_length": LENGTH,
        "model.vocab_size": 256,
        "model.tensor_model_parallel_size": 1,
        "model.pipeline_model_parallel_size": 1,
        "model.expert_model_parallel_size": 1,
        "model.sequence_parallel": False,
        "model.moe_shared_expert_overlap": False,
        "model.params_dtype": torch.float32,
        "model.pipeline_dtype": torch.float32,
        "model.autocast_dtype": torch.float32,
        "model.bf16": False,
        "model.cross_entropy_fusion_impl": "native",
        "mixed_precision": None,
        "dataset.seq_length": LENGTH,
        "dataset.split": "90,5,5",
        "dataset.num_workers": 0,
        "dataset.blend": ([f"{root}/data/{name}/text_document" for name in corpora], None),
        "tokenizer.tokenizer_type": "NullTokenizer",
        "tokenizer.tokenizer_model": None,
        "tokenizer.vocab_size": 256,
        "train.train_iters": STEPS if len(corpora) > 1 else 4,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 2,
        "validation.eval_interval": 4,
        "validation.eval_iters": 1,
        "scheduler.lr_warmup_iters": 1,
        "optimizer.lr": 3e-3,
        "logger.tensorboard_dir": None,
        "checkpoint.save": str(root / out),
        "checkpoint.load": str(root / out),
        "checkpoint.pretrained_checkpoint": base and str(root / base),
        "checkpoint.save_interval": 4,
        "dist.distributed_backend": "gloo",
    }.items():
        change(cfg, path, value, known=True)
    for key, value in CPU.get(family, {}).items():
        change(cfg.model, key, value, known=True)
    cpu.adapt(cfg.model)
    return cfg


def train(family: str, root: Path, out: str, layout: str = "", **selection: Any) -> None:
    """Trains the job from its last checkpoint on; with the selector if that has options."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    import nemo_rod

    cfg = job(family, root, out, ["new", "old"], "base")
    for key, value in LAYOUTS.get(layout, {}).items():
        setattr(cfg.model, key, value)
    selection |= {"roles": roles(root)} if selection else {}
    with nemo_rod.install("megatron_bridge", cfg, **selection) if selection else nullcontext():
        pretrain(cfg, forward_step, callbacks=[steps_writer(root / out, None)])
    dist.barrier()  # one of the processes writes


def select(family: str, root: Path, out: str, layout: str = "") -> dict[str, Any]:
    """Trains the job with the selector; returns what it chose."""
    from nemo_rod.lab import curriculum_tools
    from nemo_rod.selection import Curriculum

    train(family, root, out, layout, references=[root / "adaptation", root / "replay"])
    with Curriculum.open(root / out / "rod" / "curriculum.rod", read_only=True) as curriculum:
        arrays = curriculum_tools.arrays(curriculum)
    return {
        name: getattr(arrays, name).tolist() for name in ("step", "block_ids", "chosen", "score")
    }


def in_layout(root: Path, family: str, layout: str) -> dict[str, Any]:
    """Trains the job as it is, with TakeAll and with the selector; returns what that chose."""
    import nemo_rod

    train(family, root, f"stock_{layout}", layout)
    take_all = {"policy": nemo_rod.TakeAll(), "multiplier": 1}
    train(family, root, f"take_all_{layout}", layout, **take_all)
    return select(family, root, layout, layout)


def roles(root: Path) -> dict[str, str]:
    return {f"{root}/data/new": "adaptation", f"{root}/data/old": "replay"}


def main(root: Path, family: str) -> dict[str, Any]:
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from nemo_rod.hosts import swap_in

    pretrain(job(family, root, "base", ["old"], None), forward_step)
    pretrain(job(family, root, "specialist", ["new"], "base"), forward_step)
    for role, model in (("adaptation", "specialist"), ("replay", "base")):
        cfg = job(family, root, "rod", ["new", "old"], "base")
        options = {"role": role, "roles": roles(root), "checkpoint": root / model}
        swap_in.reference("megatron_bridge", cfg, forward_step, out=root / role, **options)
    whole = select(family, root, "rod")
    saved = root / "rod"
    shutil.rmtree(saved / f"iter_{STEPS:07}")
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    shutil.copyfile(saved / "iter_0000004" / "train_state.pt", saved / "latest_train_state.pt")
    return {"whole": whole, "resumed": select(family, root, "rod")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    from nemo_rod import cpu

    cpu.prepare()
    cpu.prepare_bridge()
    dist.init_process_group("gloo")
    place, name, *layout = sys.argv[1:]
    say((in_layout if layout else main)(Path(place), name, *layout))
    dist.destroy_process_group()
