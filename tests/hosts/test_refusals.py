"""What a swapped-in selector does not work with is refused before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from places import ROOT, WORKERS

RECIPE = ROOT / "recipes" / "swap_in" / "megatron_bridge"
SENTENCES = {
    "accepted": "^$",
    "cuda graphs": "cuda_graph_impl='local'.*set cuda_graph_impl='none'",
    "transformer engine graphs": "cuda_graph_impl='transformer_engine'",
    "megatron fsdp": "dist.use_megatron_fsdp.*set dist.use_megatron_fsdp=False",
    "ddp fsdp": "Megatron FSDP.*use_megatron_fsdp=False",
    "torch fsdp": "use_torch_fsdp2",
    "packed": "packed batches.*one sample per row",
    "document masking": "dataset.inter_document_masking: it packs documents",
    "external": "dataloader_type='external'.*'single'",
    "forced balancing": "moe_router_force_load_balancing",
    "delayed fp8": "delayed FP8 scaling",
    "context parallel": "context parallel",
    "virtual stages": "virtual pipeline stages.*overlap_p2p_comm=True",
    "offloading": "fine_grained_activation_offloading",
    "rampup": "rampup_batch_size",
    "smaller batches": "train.decrease_batch_size_if_needed: it changes the size of the pools",
    "skipping": "iterations_to_skip",
    "no blend": "without a blend of files",
    "odd length": "seq_length=60: expected a multiple of 8",
    "no role": "data/old/text_document.*whether it is adaptation or replay",
    "half a multiplier": "multiplier=1.5.*whole number",
    "no references": "Joint chooses by reducible loss: give the folders",
    "missing references": "nowhere/manifest.json does not exist",
    "drawn for nothing": "TakeAll uses no scores.*multiplier=1",
    "no host": "no host 'megatron': expected one of megatron_bridge",
    "twice": "installed already: uninstall",
    "other version": r"^megatron.bridge.data.loaders.build_pretraining_data_loader takes "
    r"\(data, consumed\) in Megatron-Bridge \S+: expected \(dataset, consumed_samples, .*"
    "install Megatron-Bridge 0.3.1 to 0.6.2, or a newer nemo_rod.$",
}

REFERENCE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import nemo_rod.megatron
from megatron.bridge.training import config, setup
from nemo_rod import swap_in
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob

sys.path.insert(0, sys.argv[1])
from before import make_config

def loads(*_):
    raise SystemExit("a model was built")

def set_later(cfg):
    cfg.ddp.reuse_grad_buf_for_mxfp8_param_ag = True

setup.setup, HostReferenceJob.model_folder = loads, lambda *_, **__: "specialist"
cfg = make_config(Path("data"), Path("out"), ["new", "old"])
if sys.argv[2] == "ddp":
    set_later(cfg)
config.runtime_config_update = set_later if sys.argv[2] == "precision" else lambda cfg: None
roles = {"data/new": "adaptation", "data/old": "replay"}
try:
    swap_in.reference("megatron_bridge", cfg, None, role="replay", roles=roles, out="out")
except ValueError as error:
    print("SAID", error)
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, WORKERS / "swap_in_refusals.py", RECIPE],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SAID "))
    return json.loads(line.removeprefix("SAID "))


def test_every_case_has_its_sentence(said: dict[str, str]) -> None:
    assert set(said) == set(SENTENCES)


@pytest.mark.parametrize("case", SENTENCES)
def test_refusal(said: dict[str, str], case: str) -> None:
    assert re.search(SENTENCES[case], said[case]), said[case]
    assert "\n" not in said[case]


@pytest.mark.parametrize("setting", ["accepted", "ddp", "precision"])
def test_references_are_refused_before_a_model_is_built(setting: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, RECIPE, setting], capture_output=True, text=True
    )
    if setting == "accepted":
        assert "a model was built" in done.stderr, done.stderr[-3000:]
    else:
        refused = "SAID Selection does not work with reuse_grad_buf_for_mxfp8_param_ag: "
        assert refused in done.stdout, done.stderr[-3000:]
