"""What a swapped-in selector does not work with is refused before anything starts."""

import re

import pytest
from places import WORKERS
from swap_in_oracle import RECIPES, answers

SHARED_BUFFERS = "Selection does not work with reuse_grad_buf_for_mxfp8_param_ag: "
SENTENCES = {
    "accepted": "^$",
    "cuda graphs": "cuda_graph_impl='local'.*set cuda_graph_impl='transformer_engine' or 'none'",
    "megatron fsdp": "dist.use_megatron_fsdp: it is not supported yet; leave it out",
    "ddp fsdp": "Megatron FSDP.*use_megatron_fsdp=False",
    "torch fsdp": "use_torch_fsdp2",
    "packed": "packed or variable-length batches.*one sample per row",
    "document masking": "dataset.inter_document_masking: it packs documents",
    "external": "dataloader_type='external'.*'single'",
    "cyclic": "dataset.dataloader_type='cyclic': it reads in an order of its own; set .*'single'",
    "rampup": "rampup_batch_size",
    "smaller batches": "train.decrease_batch_size_if_needed: it changes the size of the pools",
    "skipping": "iterations_to_skip",
    "no blend": "without a blend of files",
    "no role": "data/old/text_document.*whether it is adaptation or replay",
    "half a multiplier": r"multiplier=0.5.*a number in \[1, 1024\]",
    "no references": "Joint compares losses of .* with reference losses: give their folders",
    "missing references": "nowhere/manifest.json does not exist",
    "drawn for nothing": "TakeAll chooses nothing.*multiplier=1",
    "no host": "'megatron' names none of the hosts .*: expected one of megatron_bridge",
    "twice": "installed already: uninstall",
    "other version": r"^megatron.bridge.data.loaders.get_train_valid_test_num_samples takes "
    r"\(configuration\) in Megatron-Bridge \S+: expected \(cfg\).*"
    "install Megatron-Bridge 0.3.1 to 0.6.2, or a newer nemo_rod.$",
    "references": "^a model was built$",
    "references of adapters": "^The job trains adapters .peft.*with peft=None",
    "references by adapters": "^The job trains adapters .peft.*its adapter merged",
    "references of a damaged configuration": "/run_config.yaml is damaged",
    "references of empty": "names the checkpoint '': expected latest_checkpointed_iteration.txt to "
    "have the number of one of iter_0000004.$",
    "references of gone": "/latest_checkpointed_iteration.txt names the checkpoint '7': expected",
    "references of state": "/latest_train_state.pt is damaged: copy train_state.pt of one of iter_",
    "references of torch": "/iter_0000004 is in Megatron's format torch, which Megatron-",
    "references of zarr": "format zarr, .*Megatron-LM's --ckpt-convert-format torch_dist.$",
    "references with shared buffers": f"^{SHARED_BUFFERS}",
    "references with buffers shared later": f"^{SHARED_BUFFERS}",  # by the trainer's own setup
}


@pytest.fixture(scope="module")
def messages(torchrun):
    program = WORKERS / "swap_in_refusals.py"
    return answers(torchrun(1, program, RECIPES / "megatron_bridge"))


def test_every_case_has_its_sentence(messages):
    assert set(messages) == set(SENTENCES)


@pytest.mark.parametrize("case", SENTENCES)
def test_refusal(messages, case):
    assert re.search(SENTENCES[case], messages[case]), messages[case]
    assert "\n" not in messages[case]
