"""Special tokens of published tokenizers, and a small tokenizer with the same special tokens.

The small tokenizer encodes text as its UTF-8 bytes. Its special tokens have the published names and
order; where the published ones precede the text's tokens, they have the published ids, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rod.corpus.adapters.byte_tokenizer import write_byte_level
from nemo_rod.files import read_json
from nemo_rod.trust import name_and_revision

NUM_LOW = 64  # ids reserved for special tokens that precede the text's tokens
NUM_HIGH = 128  # special tokens after the text's tokens, at most


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a published tokenizer."""

    ids: Mapping[str, int]  # published id by name
    eos: str  # name of the tokenizer's EOS
    separator: str | None  # name of the token between documents of pretraining; None if not known
    was_read: bool = False  # whether ids and EOS were read from the tokenizer itself

    @property
    def come_first(self) -> bool:
        """Whether they precede the tokens of the text."""
        return min(self.ids.values()) < NUM_LOW

    def name_of(self, published: int) -> str:
        """Returns the name of a published id."""
        names = {number: name for name, number in self.ids.items()}
        return names.get(published, "an ordinary token")

    def small_ids(self) -> dict[str, int]:
        """Returns the ids in the small tokenizer: the published ones, or those after 256 bytes."""
        if self.come_first:
            return {name: number for name, number in self.ids.items() if number < NUM_LOW}
        ordered = sorted(self.ids, key=lambda name: self.ids[name])[:NUM_HIGH]
        return {name: 256 + place for place, name in enumerate(ordered)}


_QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> "
    "<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
    "<|image_pad|> <|video_pad|>"
)


def _numbered(first: int, names: str) -> dict[str, int]:
    return {name: first + place for place, name in enumerate(names.split())}


_NEMOTRON = _numbered(0, "<unk> <s> </s>")
_SMOLLM2 = _numbered(
    0,
    "<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename> <gh_stars> "
    "<issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> "
    "<jupyter_output> <jupyter_script> <empty_output>",
)
# Names of models, as a pattern -> their special tokens. Qwen3.5's ids follow from its config
# (image_token_id 248056); that documents of Nemotron models end with id 2 is the authors' finding.
_KNOWN = {
    r"(?i)SmolLM2.*instruct": SpecialTokens(_SMOLLM2, "<|im_end|>", "<|endoftext|>"),
    r"(?i)SmolLM2": SpecialTokens(_SMOLLM2, "<|endoftext|>", "<|endoftext|>"),
    r"(?i)Llama-3": SpecialTokens(
        _numbered(128_000, "<|begin_of_text|> <|end_of_text|>"), "<|end_of_text|>", None
    ),
    r"(?i)gemma-3": SpecialTokens(_numbered(0, "<pad> <eos> <bos> <unk>"), "<eos>", None),
    r"Qwen3\.5": SpecialTokens(_numbered(248_044, _QWEN), "<|endoftext|>", "<|endoftext|>"),
    r"Qwen3": SpecialTokens(_numbered(151_643, _QWEN), "<|endoftext|>", "<|endoftext|>"),
    r"Nemotron-3": SpecialTokens(
        _NEMOTRON | _numbered(10, "<|im_start|> <|im_end|> <think> </think>"), "<|im_end|>", "</s>"
    ),
    r"Nemotron": SpecialTokens(
        _NEMOTRON | _numbered(10, "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <SPECIAL_13>"),
        "</s>",
        "</s>",
    ),
}


def special_tokens(name: str) -> SpecialTokens:
    """Returns a tokenizer's special tokens, from its folder, the hub's cache, or the known models.

    Raises:
        ValueError: none of these has them, or files are damaged.
    """
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").is_file():
        return _read(folder)
    known = next((tokens for pattern, tokens in _KNOWN.items() if re.search(pattern, name)), None)
    files = [published_file(name, file) for file in ("tokenizer.json", "tokenizer_config.json")]
    if files[0] is not None and files[1] is not None:
        tokens = _read(files[0].parent)
        if known is not None and known.separator in tokens.ids:  # independent of its EOS
            tokens = dataclasses.replace(tokens, separator=known.separator)
        return tokens
    if known is not None:
        return known
    raise ValueError(
        f"The special tokens of {name} are not known: a rehearsal knows those of Qwen3, Qwen3.5, "
        "Nemotron-Nano-v2, Nemotron-3, SmolLM2, Llama 3 and Gemma 3; give a folder with its "
        "tokenizer.json, or download it into the hub's cache."
    )


def published_file(name: str, file: str) -> Path | None:
    """Returns a file of a model from its folder or the hub's cache; None if it is not here."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        repository, revision = name_and_revision(name)
        path = try_to_load_from_cache(repository, file, revision=revision)
    except HFValidationError:  # the name of a missing folder
        return None
    return Path(path) if isinstance(path, str) else None


def _read(folder: Path) -> SpecialTokens:
    added = read_json(folder / "tokenizer.json", "added_tokens")["added_tokens"]
    ids = {token["content"]: token["id"] for token in added if token["special"]}
    config = read_json(folder / "tokenizer_config.json")
    eos = config.get("eos_token")
    eos = str(eos["content"] if isinstance(eos, dict) else eos)
    if eos not in ids:
        raise ValueError(
            f"{folder} has no special token for eos_token={eos}: correct its tokenizer_config.json."
        )
    # tokens of a known model identify its separator, which may differ from the EOS
    known = [t for t in _KNOWN.values() if t.ids.items() <= ids.items() and t.eos == eos]
    return SpecialTokens(ids, eos, known[0].separator if known else None, was_read=True)


def write_tokenizer(tokens: SpecialTokens, folder: Path) -> None:
    """Writes the small tokenizer, as `AutoTokenizer.from_pretrained` reads it."""
    from tokenizers.pre_tokenizers import ByteLevel

    special = tokens.small_ids()
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    if tokens.come_first:
        vocabulary = {letter: NUM_LOW + place for letter, place in vocabulary.items()}
        unused = set(range(NUM_LOW)) - set(special.values())
        special |= {f"<unused_{number}>": number for number in unused}
    ordered = sorted(special, key=lambda name: special[name])
    write_byte_level({**vocabulary, **special}, ordered, tokens.eos, folder)
