"""Token losses without ever holding the logits of a whole block.

With a vocabulary of 248,320 the fp32 logits of one block of 4096 tokens take 4.1 GB, and the cross
entropy copies them. Here the output layer and the loss process as many tokens of every block at a
time as fit into `MAX_LOGITS_BYTES`; under tensor parallelism the logits stay split over the
vocabulary.

Slices are as long as that limit allows, since each costs a matrix product and a round of reductions
over the tensor-parallel ranks.

If TransformerEngine is installed, its cross entropy is used, whichever training uses: it reads the
logits once. Megatron's own computes a softmax in fp32, which only a backward pass needs; it took
two fifths of the scoring time of a model of 0.5B parameters with 151,936 tokens on an H100.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from nemo_rod.config import MAX_LOGITS_BYTES
from nemo_rod.megatron.scoring.forward_only import patching


@contextmanager
def sliced_logits(model: list) -> Iterator[None]:
    """Makes the model's last stage compute its loss in slices of the sequence.

    Only for forward passes without gradients: a backward pass would keep every slice anyway.
    """
    # the module's own layer: some wrappers expose all names of the wrapped module
    modules = (module for chunk in model for module in chunk.modules())
    heads = [m for m in modules if "output_layer" in m._modules and m.post_process]
    for module in heads:
        _slice_head(module)
    try:
        with ExitStack() as stack:
            cross_entropy = getattr(language_module, "te_parallel_cross_entropy", None)
            if torch.cuda.is_available() and cross_entropy is not None:
                for config in {id(module.config): module.config for module in heads}.values():
                    stack.enter_context(patching(config, "cross_entropy_loss_fusion", True))
                    stack.enter_context(patching(config, "cross_entropy_fusion_impl", "te"))
            yield
    finally:
        for module in heads:
            del module.output_layer.forward, module.compute_language_model_loss


def _slice_head(module: Any) -> None:
    """Makes the output layer return its input, which the loss runs through it slice by slice."""
    layer = module.output_layer
    logits_of, loss_of = layer.forward, module.compute_language_model_loss
    given: dict[str, Any] = {}

    def keep_hidden(hidden_SBH: torch.Tensor, weight: Any = None, **options: Any) -> tuple:
        given.update(weight=weight, **options)
        return hidden_SBH, None

    def loss_by_slices(labels_BS: torch.Tensor, hidden_SBH: torch.Tensor) -> torch.Tensor:
        length = slice_length(len(labels_BS), layer.output_size_per_partition)
        split = layer.sequence_parallel
        with patching(layer, "sequence_parallel", False):
            if split:  # the layer itself would first gather the whole sequence
                hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=layer.tp_group)
            parts = []
            for labels_Bs, hidden_sBH in zip(
                labels_BS.split(length, dim=1), hidden_SBH.split(length, dim=0), strict=True
            ):
                logits_sBV = logits_of(hidden_sBH, **given)[0]
                parts.append(loss_of(labels_Bs, logits_sBV))
                del logits_sBV  # frees memory before the next slice is made
        return torch.cat(parts, dim=1)

    layer.forward, module.compute_language_model_loss = keep_hidden, loss_by_slices


def slice_length(num_samples: int, vocabulary: int) -> int:
    """Returns the number of tokens of every sample in a slice.

    It is a power of two that does not depend on the length of samples, so that whole blocks and
    their prefixes are cut in the same places; `vocabulary` are the logits per token on this rank.
    """
    tokens = MAX_LOGITS_BYTES // (4 * num_samples * vocabulary)  # in fp32
    return 1 << max(0, tokens.bit_length() - 1)
