"""The base model of a run: initialised here or pretrained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nemo_rod.files import digest_of_files

# Projections onto the residual stream; transformers itself scales those of Mamba blocks.
_TO_RESIDUAL = ("o_proj", "linear_attn.out_proj", "down_proj")


def initialise_base(
    architecture: dict[str, Any], folder: Path, *, tokenizer: str, seed: int
) -> None:
    """Writes a randomly initialised Hugging Face checkpoint for a base that is trained here.

    Matrices are drawn from N(0, 0.02), those that write to the residual stream scaled by
    1 / sqrt(2 * layers).

    Args:
        architecture: keyword arguments of the model type's Hugging Face config, and `model_type`.
        folder: target folder; an existing checkpoint is kept.
        tokenizer: name of the tokenizer saved with the weights, so that the folder loads alone.
        seed: seed of the random weights.
    """
    if (folder / "tokenizer_config.json").exists():  # written last
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rod.corpus.tokenizer import load_tokenizer
    from nemo_rod.published import save_published

    options = dict(architecture)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    text = load_tokenizer(tokenizer)
    config.eos_token_id = text.eod_id
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    scale = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # transformers 5 stores experts in one tensor, whose name lacks `.weight`
            if name.removesuffix(".weight").endswith(_TO_RESIDUAL):
                weight.mul_(scale)
    save_published(model, folder)
    text.save_pretrained(folder)


def check_tokenizer(checkpoint: Path, blocks: Path) -> None:
    """Refuses a model whose tokenizer is not that of the blocks.

    Raises:
        ValueError: if the tokenizers differ, or the model's vocabulary is smaller.
    """
    from transformers import AutoConfig

    from nemo_rod.corpus import BlockStore, load_tokenizer

    store = BlockStore(blocks)
    store.check_tokenizer(load_tokenizer(str(checkpoint)))
    described = AutoConfig.from_pretrained(checkpoint)
    vocab_size = described.get_text_config().vocab_size  # for a multimodal model: its text part
    if vocab_size < store.vocab_size:
        raise ValueError(
            f"The model in {checkpoint} knows {vocab_size} tokens, but the tokenizer of {blocks} "
            f"has {store.vocab_size}: set vocab_size of the architecture to at least that."
        )


def resolve_base(name: str, link: Path) -> None:
    """Links `link` to a pretrained checkpoint, fetched from the hub unless it is a folder.

    Raises:
        ValueError: if the name is neither a folder nor on the hub.
    """
    if link.is_symlink():
        return
    if Path(name).is_dir():
        folder = Path(name).resolve()
    else:
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name))
        except Exception as error:
            raise ValueError(
                f"model.hf={name} is neither a folder here nor could it be fetched from the "
                f"Hugging Face hub ({type(error).__name__}): check the name, or fetch it first and "
                "give its folder."
            ) from error
    os.symlink(folder, link)


def checkpoint_digest(folder: Path) -> str:
    """Returns the content digest of a Hugging Face checkpoint's weights, in hex.

    Raises:
        ValueError: if the folder holds no safetensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors: expected a Hugging Face checkpoint.")
    return digest_of_files(files)
