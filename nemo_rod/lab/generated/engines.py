"""Samplers: vLLM if it is installed and there is a GPU, otherwise transformers.

Both give sequences of one length, and the model's own loss of every token: at temperature 1 and
before any other change of its distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_rod.lab.sample import load_quietly

_SCORED_TOKENS = 2048  # tokens whose logits are held at once

Sampled = tuple[list[list[int]], list[list[float]]]


def choose(name: str | None) -> str:
    """Returns the name of the engine that is asked for, or of the fastest here.

    Raises:
        ValueError: the engine is not installed.
    """
    installed = find_spec("vllm") is not None
    if name == "vllm" and not installed:
        raise ValueError("vllm is not installed here: install it, or use engine: transformers.")
    if name is None and installed:
        import torch

        name = "vllm" if torch.cuda.is_available() else None
    return name or "transformers"


class Transformers:
    """Samples with transformers, on a GPU in bf16 or a CPU in fp32."""

    def __init__(self, folder: Path, length: int) -> None:
        """Loads the model of a checkpoint, for sequences of `length` tokens."""
        import torch

        self.length = length
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model = load_quietly(folder, dtype=dtype)
        self.model = model.to(self.device).eval()

    def sample(self, starts: Sequence[list[int]], temperature: float, seed: int) -> Sampled:
        """Returns token ids [N, length], and nats of all but the first of each [N, length - 1].

        Args:
            starts: token ids of the beginnings, each begun by an end of document.
            temperature: above 0; 1 is the model's own distribution.
            seed: of the whole batch, and no other batch's.
        """
        import torch

        sequences: list[list[int]] = []
        losses: list[list[float]] = []
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            # One call for every length of start: padding would not be the base's own text.
            for _, group in itertools.groupby(sorted(starts, key=len), len):
                ids = torch.tensor(list(group), device=self.device)
                made = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                    temperature=temperature, eos_token_id=None, pad_token_id=int(ids[0, 0]),
                    min_new_tokens=self.length - ids.shape[1],
                    max_new_tokens=self.length - ids.shape[1],
                )  # fmt: skip
                sequences += made.tolist()
            step = max(1, _SCORED_TOKENS // self.length)
            for start in range(0, len(sequences), step):
                ids = torch.tensor(sequences[start : start + step], device=self.device)
                logits = self.model(ids).logits[:, :-1].float().transpose(1, 2)
                cost = torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
                losses += cost.tolist()
        return sequences, losses


class VLLM:
    """Samples with vLLM, whose log-probabilities are those before the temperature."""

    def __init__(self, folder: Path, length: int) -> None:
        from vllm import LLM

        self.length = length
        self.model: Any = LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length,
            generation_config="vllm",
        )  # fmt: skip

    def sample(self, starts: Sequence[list[int]], temperature: float, seed: int) -> Sampled:
        """See `Transformers.sample`; every sequence has a seed of its own."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=temperature, seed=seed * len(starts) + row, ignore_eos=True,
                max_tokens=self.length - len(start), logprobs=0, prompt_logprobs=0,
                detokenize=False,
            )
            for row, start in enumerate(starts)
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": start} for start in starts]
        sequences, losses = [], []
        for start, found in zip(
            starts, self.model.generate(prompts, parameters, use_tqdm=False), strict=True
        ):
            (made,) = found.outputs
            sequences.append([*start, *made.token_ids])
            # Of the first token of a prompt there is none.
            rows = [*found.prompt_logprobs[1:], *made.logprobs]
            losses.append(
                [-row[token].logprob for token, row in zip(sequences[-1][1:], rows, strict=True)]
            )
        return sequences, losses


ENGINES: dict[str, type[Transformers] | type[VLLM]] = {"transformers": Transformers, "vllm": VLLM}
