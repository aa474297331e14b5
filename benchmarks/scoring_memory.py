"""Peak memory of scoring one block, with its logits in slices and with all of them at once.

Logits in slices are how blocks are scored; all at once is the same pass without that. Either runs
in a process of its own. The model is small: what is measured is the vocabulary's share.

    python benchmarks/scoring_memory.py [--quick] [--json FILE]
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from _memory import peak_beyond
from _rows import Row, Setting, run, under

TOKENS = 4096
VOCABULARIES = (131_072, 248_320)  # of Nemotron and of Qwen3.5


def vocabularies(setting: Setting) -> Iterator[Row]:
    for size in VOCABULARIES[:1] if setting.quick else VOCABULARIES:
        naive, sliced = peak_gib(size, sliced=False), peak_gib(size, sliced=True)
        yield Row(f"all_logits_{size}", naive, "GiB")
        yield Row(f"in_slices_{size}", sliced, "GiB")
        yield under(f"memory_{size}", sliced / naive, "x", 0.25)


def peak_gib(vocabulary: int, *, sliced: bool) -> float:
    """What the pass needs beyond what was there before it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, vocabulary, sliced))
    process.start()
    theirs.close()
    value = ours.recv()
    process.join()
    return value


def _measure(pipe: Any, vocabulary: int, sliced: bool) -> None:
    import torch
    import torch.distributed as dist

    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
    from nemo_rod.megatron.scoring import scoring_pass

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    model = _model(vocabulary).cuda()
    tokens = torch.randint(0, vocabulary, (1, TOKENS)).cuda()
    batch = {
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "loss_mask": torch.ones_like(tokens, dtype=torch.float32),
        "position_ids": torch.arange(TOKENS, device=tokens.device)[None],
    }
    from megatron.core.pipeline_parallel import get_forward_backward_func

    whole = patch.object(scoring_pass, "sliced_logits", lambda *_: nullcontext())
    slices = nullcontext() if sliced else whole
    with slices, peak_beyond() as peak:
        (losses,) = scoring_pass.scoring_pass(
            get_forward_backward_func(),
            [model],
            scoring_pass.plain_forward_step,
            data_iterator=iter([batch]),
            num_microbatches=1,
            seq_length=TOKENS,
            micro_batch_size=1,
        )
    assert losses.isfinite().all()
    pipe.send(peak[0])
    pipe.close()
    os._exit(0)


def _model(vocabulary: int) -> Any:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=1,
        params_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=vocabulary,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )


if __name__ == "__main__":
    run(__doc__ or "", {"vocabularies": vocabularies})
