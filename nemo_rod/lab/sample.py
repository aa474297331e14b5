"""`nemo-rod inspect RUN_DIR prompt=TEXT`: completions of a prompt by the models of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.commands.arguments import Key
from nemo_rod.corpus.store import BlockStore
from nemo_rod.lab.block_text import find_tokenizer
from nemo_rod.lab.data_alone import refuse_code, refuse_unlike_weights
from nemo_rod.lab.launches import read_launch
from nemo_rod.lab.text import TRUST, printable_lines
from nemo_rod.parts import did_you_mean
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.trust import explain_own_code

if TYPE_CHECKING:
    from nemo_rod.corpus.tokenizer_identity import Tokenizer

KEYS = (  # keys of `nemo-rod inspect`
    Key("prompt", "TEXT", "of a run folder: what its models write after this text"),
    Key("arm", "ARM,...", "with prompt=: arms side by side, rod by default; base for the base"),
    Key("tokens", "N", "with prompt=: tokens to write, 64 by default", read=int, bound=">= 1",
        default=64),
    TRUST,
)  # fmt: skip


def load_quietly(folder: str | Path, **options: Any) -> Any:
    """Returns a checkpoint's model, as AutoModelForCausalLM loads it, without a bar of its own."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would stand among the lines of progress
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def sample(run_dir: Path, options: Namespace) -> None:
    """Prints the continuation of a prompt by every arm; on a GPU where there is one."""
    _, config = read_launch(run_dir, trusted=bool(options.trust_remote_code))
    run = RunFolder(run_dir, config.recipe)
    made = {path.parent.name for path in run_dir.glob("arms/*/hf")} | {"base"}
    arms = (options.arm or "rod").split(",")
    for arm in arms:
        if arm not in made or not (run.checkpoint(arm) / "config.json").is_file():
            raise ValueError(
                f"arm={arm} has no checkpoint in {run_dir}{did_you_mean(arm, made)}: "
                f"expected one of {', '.join(sorted(made))}; run `nemo-rod "
                f"{run.command('run')}` to make it."
            )
    tokenizer = find_tokenizer(BlockStore(run.blocks))
    for arm in arms:
        (text,) = continuations(
            run.checkpoint(arm),
            tokenizer,
            [options.prompt],
            tokens=options.tokens,
            trust_remote_code=config.model.trust_remote_code,
        )
        print(f"--- {arm}\n{options.prompt}{printable_lines(text)}", flush=True)


def continuations(
    checkpoint: Path,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    trust_remote_code: bool = False,
) -> list[str]:
    """Returns the likeliest completion of each prompt by a checkpoint, up to its EOD.

    Raises:
        ValueError: a prompt has no token.
    """
    import torch

    ids_by_prompt = [ids.tolist() for ids in tokenizer.encode_batch([*prompts])]
    for prompt, ids in zip(prompts, ids_by_prompt, strict=True):
        if not ids:
            raise ValueError(f"prompt={prompt!r} has no token: expected some text.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with explain_own_code(f"The checkpoint {checkpoint}", "trust_remote_code"):
        if not trust_remote_code:
            refuse_code(checkpoint)
            refuse_unlike_weights(checkpoint)
        loaded = load_quietly(
            checkpoint,
            torch_dtype="auto",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    model = loaded.to(device).eval()
    texts = []
    with torch.no_grad():
        for ids in ids_by_prompt:
            given = torch.tensor([ids], device=device)
            written = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=tokens,
                do_sample=False, eos_token_id=tokenizer.eod_id, pad_token_id=tokenizer.eod_id,
            )  # fmt: skip
            new = written[0, len(ids) :].tolist()
            texts.append(tokenizer.decode([token for token in new if token != tokenizer.eod_id]))
    return texts
