"""Our examples in training programs of others, as they are: LLaMA-Factory and NeMo Automodel."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from corpus_cases import train_bpe
from places import ROOT, WORKERS
from swap_in_oracle import RECIPES
from tiny import BATCH, metric

from nemo_rod.selection import Curriculum

pytestmark = pytest.mark.examples
EXAMPLES = ROOT / "docs" / "examples"
AUTOMODEL = EXAMPLES / "plain_torch" / "automodel.py"
CHECKOUT = os.environ.get("LLAMA_FACTORY", "")


@pytest.fixture(scope="module")
def llama_factory(tmp_path_factory, torchrun):
    """A base, two corpora, and the example's file at their sizes, without a GPU."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("llama_factory")
    make_data = RECIPES / "megatron_bridge" / "make_data.py"
    torchrun(0, "nemo_rod.cpu.on_cpu", "core", make_data, root / "data")
    train_bpe(root / "base", 280)
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(root / "base")), hidden_size=32,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(root / "base")
    texts = root / "texts"
    texts.mkdir()
    (texts / "some.json").write_text(json.dumps([{"text": "the cat sat"}] * 2))
    known = {"c4_demo": {"file_name": "some.json", "columns": {"prompt": "text"}}}
    (texts / "dataset_info.json").write_text(json.dumps(known))
    job = yaml.safe_load((EXAMPLES / "watch" / "llama_factory.yaml").read_text())
    extra = json.loads(job["extra_config"])
    assert {*extra} == {f"dataset.{key}" for key in ("split", "blend")} | {
        "checkpoint.pretrained_checkpoint"
    }
    corpora = [f"{root}/data/{name}/text_document" for name in ("new", "old")]
    extra |= {
        "checkpoint.pretrained_checkpoint": f"{root}/base", "dataset.split": "90,5,5",
        "dataset.blend": [corpora, [0.7, 0.3]], "dataset.num_workers": 0,
        "mixed_precision": None, "dist.distributed_backend": "gloo",
    }  # fmt: skip
    del job["mixed_precision"]
    job |= {
        "model_name_or_path": f"{root}/base", "dataset_dir": str(texts), "cutoff_len": 64,
        "preprocessing_num_workers": 1, "save_steps": 4, "eval_steps": 2, "max_steps": 6,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-3,
        "warmup_steps": 1, "bf16": False, "use_cpu": True, "extra_config": json.dumps(extra),
    }  # fmt: skip
    for how in ("stock", "watch"):
        job["output_dir"] = str(root / how)
        (root / f"{how}.yaml").write_text(yaml.safe_dump(job))
        path = [EXAMPLES / "watch", Path(CHECKOUT, "src"), os.environ.get("PYTHONPATH", "")]
        env = {
            "PYTHONPATH": os.pathsep.join(map(str, path)), "USE_MEGATRON_BRIDGE": "1",
            "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        worker = WORKERS / "llama_factory_worker.py"
        torchrun(1, worker, how, root, root / f"{how}.yaml", env=env, fresh=True)
    return root


def test_a_watched_job_of_llama_factory_is_the_job_to_the_bit(llama_factory):
    stock, watched = (llama_factory / how / "steps.jsonl" for how in ("stock", "watch"))
    assert watched.read_bytes() == stock.read_bytes()
    losses = [json.loads(line)["loss"] for line in stock.read_text().splitlines()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    last = json.loads((llama_factory / "watch/rod/metrics.jsonl").read_text().splitlines()[-1])
    for role, name in (("adaptation", "new"), ("replay", "old")):
        assert 0 < last[f"validation/{role}/{name}/text_document/loss"] < losses[0]


def test_automodel_trains_on_what_is_chosen_and_resumes(tiny, torchrun, tmp_path):
    """In two processes of FSDP2, from the base on: replay scores 0 at first, within rounding."""
    keys = {
        "rod.blocks": tiny.blocks, "rod.adaptation": tiny.references[0],
        "rod.replay": tiny.references[1], "rod.out": tmp_path / "rod",
        "model.pretrained_model_name_or_path": tiny.base, "dist_env.backend": "gloo",
        "distributed.mp_policy.param_dtype": "float32",
        "step_scheduler.ckpt_every_steps": 3, "checkpoint.checkpoint_dir": tmp_path / "saved",
    }  # fmt: skip

    def train(steps: int) -> list:
        every = {**keys, "step_scheduler.max_steps": steps}
        words = ["--config", AUTOMODEL.with_suffix(".yaml")]
        words += [f"--{key}={value}" for key, value in every.items()]
        path = f"{AUTOMODEL.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        worker = WORKERS / "automodel_worker.py"
        torchrun(2, worker, *words, env={"PYTHONPATH": path}, fresh=True)
        return list(Curriculum.open(tmp_path / "rod" / "curriculum.rod", read_only=True))

    first = train(3)
    assert len(first) == 3 and all(len(record.chosen) == BATCH for record in first)
    for record in first:
        assert {*record.chosen} == {*np.argsort(record.score)[-BATCH:]}
    is_replay = first[0].block_ids >= tiny.store.num_adaptation
    assert abs(first[0].score[is_replay]).max() < 1e-5
    both = train(6)
    assert len(both) == 6 and metric(tmp_path / "rod", "step") == list(range(6))
    assert [record.chosen.tolist() for record in both[:3]] == [r.chosen.tolist() for r in first]
