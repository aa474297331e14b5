"""What a swapped-in selector does not work with is refused before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

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


@pytest.fixture(scope="module")
def said(torchrun: Callable[..., list[str]]) -> dict[str, str]:
    (printed,) = torchrun(1, WORKERS / "swap_in_refusals.py", RECIPE)
    (line,) = (line for line in printed.splitlines() if line.startswith("SAID "))
    return json.loads(line.removeprefix("SAID "))


def test_every_case_has_its_sentence(said: dict[str, str]) -> None:
    assert set(said) == set(SENTENCES)


@pytest.mark.parametrize("case", SENTENCES)
def test_refusal(said: dict[str, str], case: str) -> None:
    assert re.search(SENTENCES[case], said[case]), said[case]
    assert "\n" not in said[case]


@pytest.mark.parametrize("setting", ["accepted", "ddp", "precision"])
def test_references_are_refused_before_a_model_is_built(
    torchrun: Callable[..., list[str]], setting: str
) -> None:
    program = WORKERS / "swap_in_reference_refusals.py"
    accepted = setting == "accepted"
    (printed,) = torchrun(1, program, RECIPE, setting, expect_failure=accepted)
    refused = "SAID Selection does not work with reuse_grad_buf_for_mxfp8_param_ag: "
    assert ("a model was built" if accepted else refused) in printed
