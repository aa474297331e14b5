"""The base model of a run: initialised here or pretrained."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from nemo_rod.checkpoints.published import WEIGHTS
from nemo_rod.config import Domain, Model
from nemo_rod.corpus.adapters.hub_files import name_and_revision
from nemo_rod.corpus.input_files import HEAD, refuse_placeholder
from nemo_rod.files import digest_files, interpreting, open_file, read_json
from nemo_rod.run.renamed_tokens import check_renamed
from nemo_rod.trust import explain_own_code

# Projections onto the residual stream; transformers itself scales those of Mamba blocks.
_TO_RESIDUAL = ("o_proj", "linear_attn.out_proj", "down_proj")
# Published names of input embeddings; suffixes, since some models are nested in others.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|word_embeddings|wte)\.weight$")
# after an interrupted copy, or a clone without Git LFS
_FETCH = "fetch or copy the whole checkpoint again"


def initialise_base(
    architecture: dict[str, Any], folder: Path, *, tokenizer: str, seed: int, eod: int | None = None
) -> None:
    """Writes a randomly initialised Hugging Face checkpoint for a base that is trained here.

    Matrices are drawn from N(0, 0.02), those that write to the residual stream scaled by
    1 / sqrt(2 * layers).

    Args:
        architecture: keyword arguments of the model type's Hugging Face config, and `model_type`.
        folder: target folder; an existing checkpoint is kept.
        tokenizer: name of the tokenizer saved with the weights, so that the folder loads alone.
        seed: seed of the random weights.
        eod: see `config.Domain`.
    """
    if (folder / "tokenizer_config.json").exists():  # written last
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rod.checkpoints.published import save_published
    from nemo_rod.corpus.tokenizer import load_tokenizer

    options = dict(architecture)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    text = load_tokenizer(tokenizer, eod=eod)
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


def check_tokenizer(checkpoint: Path, blocks: Path, model: Model, domain: Domain) -> None:
    """Refuses a model whose tokenizer is not that of the blocks, or whose vocabulary is smaller.

    With `model.special_tokens` renamed, the names of special tokens may differ.
    """
    from transformers import AutoConfig

    from nemo_rod.corpus import BlockStore, load_tokenizer

    store, trusted = BlockStore(blocks), model.trust_remote_code
    options: dict[str, Any] = {"eod": domain.eod, "trust_remote_code": trusted}
    tokenizer = load_tokenizer(str(checkpoint), **options)
    if model.special_tokens == "same":
        store.check_tokenizer(tokenizer)
    else:
        check_renamed(store, load_tokenizer(domain.tokenizer, **options), tokenizer)
    with explain_own_code(f"The checkpoint {checkpoint}"):
        described = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trusted)
    vocab_size = described.get_text_config().vocab_size  # a multimodal model's text part
    if vocab_size < store.vocab_size:
        cure = "remove from its files the tokens that were added later, and prepare the blocks anew"
        if model.hf is None:
            cure = "set vocab_size of the architecture to at least that"
        raise ValueError(
            f"The model in {checkpoint} knows {vocab_size} tokens, but the tokenizer of {blocks} "
            f"has {store.vocab_size}: {cure}."
        )


def check_base(checkpoint: Path, blocks: Path, model: Model, domain: Domain) -> None:
    """Refuses a base as `check_tokenizer` does, or without all its weights, or with some twice.

    Warns of one never trained on the blocks' EOD: the embedding of such a token is all zeros.
    """
    from safetensors import safe_open

    from nemo_rod.corpus import BlockStore

    check_tokenizer(checkpoint, blocks, model, domain)
    eod, index = BlockStore(blocks).eod_id, checkpoint / "model.safetensors.index.json"
    files, whole = {*checkpoint.glob(WEIGHTS)}, checkpoint / "model.safetensors"
    seen, zero = set[str](), ""
    if index.is_file() and whole not in files:
        with interpreting(index, cure=_FETCH):
            files |= {checkpoint / name for name in read_json(index)["weight_map"].values()}
    for file in sorted(files, key=lambda file: (file.is_file(), file != whole, file)):
        if not file.is_file():
            raise ValueError(f"{file} is missing: {_FETCH}")
        with file.open("rb") as head:
            refuse_placeholder(file, head.read(HEAD))
        with interpreting(file, cure=_FETCH), safe_open(file, framework="pt") as tensors:
            names = {*tensors.keys()}
            for name in filter(_EMBEDDING.search, names):
                if not tensors.get_slice(name)[eod : eod + 1].any():
                    zero = zero or f"{name} of {file}"
        if seen & names and not index.is_file():  # Bridge reads either, transformers the whole
            raise ValueError(f"{file} repeats tensors of other files: move it out of the folder")
        seen |= names
    if zero:
        warning = (
            f"the embedding of token {eod}, which ends documents, is zero in {zero}: the base "
            "never met it, and gradients may overflow; set domain.eod to the token that ended "
            "documents in its own training"
        )
        print(f"  Warning: {warning}.", file=sys.stderr, flush=True)


def resolve_base(name: str, link: Path) -> None:
    """Links `link` to a folder, or to the fetched NAME or NAME@REVISION of the hub.

    Raises:
        ValueError: there is no such folder and the hub does not provide it.
    """
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            repository, revision = name_and_revision(name)
            folder = Path(snapshot_download(repository, revision=revision))
        except Exception as error:
            raise ValueError(
                f"model.hf={name} is neither a folder here nor could it be fetched from the "
                f"Hugging Face hub ({type(error).__name__}): check the name, or fetch it first and "
                "give its folder."
            ) from error
    link.unlink(missing_ok=True)
    os.symlink(folder, link)


def commit_of(checkpoint: Path) -> str | None:
    """Returns the commit of a checkpoint in the hub's cache, None for another folder."""
    folder = checkpoint.resolve()
    return folder.name if folder.parent.name == "snapshots" else None


def checkpoint_digest(folder: Path) -> str:
    """Returns the content digest of a Hugging Face checkpoint's weights, in hex."""
    from safetensors import safe_open

    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors: expected a Hugging Face checkpoint.")
    for file in files:
        with interpreting(file, cure=_FETCH), open_file(file), safe_open(file, "np"):
            pass  # no pipe, and of the size that its header says: not of terabytes
    return digest_files(files)
