"""Long documents: in pieces, with the tokens of the whole and bounded memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import BYTE, interrupted, refuse, run, train_bpe, tree, web, write, write_parquet
from hypothesis import given as given_any
from hypothesis import strategies as st

from nemo_rod.corpus import BlockStore, formats, load_tokenizer
from nemo_rod.corpus.adapters.hub_tokenizer import HuggingFaceTokenizer
from nemo_rod.corpus.encode import encode, pieces
from nemo_rod.corpus.tokenizer_identity import Tokenizer

pytest.importorskip("transformers")
WORDS = ["the cat", "sat", "mat;", "don't", "1234567", "Zwölf", "你好，世界", "🙂", "<|end|>",
         "  two", "a\n\n  b", "\tx", "e\u0301", "..."]  # fmt: skip


def fast(folder: Path, backend: Any) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    return HuggingFaceTokenizer(str(folder))


def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """One of each kind that differs at the beginning of a text or at white space."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    made: dict[str, Any] = {"byte": BYTE}
    made["gpt2"] = load_tokenizer(str(train_bpe(folder / "gpt2", vocabulary=400)))
    pattern = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    llama = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]  # as that of Llama 2
    forms = {
        "cl100k": (models.BPE(), None, pre_tokenizers.Sequence([split, level])),
        "metaspace": (models.BPE(unk_token="?"), None, pre_tokenizers.Metaspace()),
        "llama2": (models.BPE(unk_token="?", fuse_unk=True), normalizers.Sequence(llama), None),
        "prefix": (models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "wordpiece": (models.WordPiece(unk_token="?"), normalizers.BertNormalizer(),
                      pre_tokenizers.BertPreTokenizer()),
        "unigram": (models.Unigram(), normalizers.NFKC(), pre_tokenizers.Metaspace()),
    }  # fmt: skip
    for name, (model, normalizer, pre_tokenizer) in forms.items():
        backend = Tokenizer(model)
        options: dict[str, Any] = {"special_tokens": ["<|end|>", "?"], "show_progress": False}
        kind = trainers.BpeTrainer
        if name == "unigram":
            kind, options["unk_token"] = trainers.UnigramTrainer, "?"
        if name == "wordpiece":
            kind = trainers.WordPieceTrainer
        if normalizer:
            backend.normalizer = normalizer
        if pre_tokenizer:
            backend.pre_tokenizer = pre_tokenizer
        backend.train_from_iterator([" ".join(WORDS)] * 9, kind(vocab_size=300, **options))
        made[name] = fast(folder / name, backend)
    return made


def long_text(seed: int, count: int = 500) -> str:
    dice = np.random.default_rng(seed)
    ends = [" ", " ", " ", "\n", "\r\n", "  ", "\n\n", "\t"]
    return "".join(WORDS[i] + ends[j] for i, j in dice.integers(0, (14, 8), (count, 2)))


def test_pieces_have_the_tokens_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.PIECE_CHARS", 600)
    for name, tokenizer in tokenizers(tmp_path).items():
        texts = [long_text(seed) for seed in range(3)]
        texts += [texts[0].replace(" ", end) for end in ("\t", "\n", "\r\n", "\u00a0", "\u3000")]
        # without white space, which is cut all the same
        texts += ["你好，世界" * 700, "abcdefghij" * 400, "don't" * 800, "\n" * 4000]
        texts += ["🙂\u200d" * 2000] * (name == "byte")
        for number, text in enumerate(texts):
            (whole,) = tokenizer.encode_batch([text])
            parts = list(pieces(tokenizer, text))
            assert len(parts) > 5 and max(len(part) for part, _ in parts) <= 600, name
            tokens, lengths = encode(tokenizer, ["a", text, "b"])
            assert lengths.tolist()[1] == len(whole), (name, number)
            assert tokens.tolist()[lengths[0] :][: len(whole)] == whole.tolist(), name


@pytest.mark.parametrize(
    ("fields", "workers"), [({}, 2), ({"document_holdout": True}, 1), ({"max_tokens": 3000}, 1)]
)
def test_blocks_do_not_depend_on_the_pieces(tmp_path, monkeypatch, fields, workers):
    documents = [long_text(seed, 40 + 200 * (seed % 3 == 0)) for seed in range(20)]
    spec = web(write(tmp_path / "a.jsonl", documents), **fields)
    run(tmp_path / "whole", [spec])
    monkeypatch.setattr("nemo_rod.corpus.encode.PIECE_CHARS", 300)
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 700)
    interrupted(tmp_path / "pieces", [spec], 4, 5, workers=workers)
    run(tmp_path / "pieces", [spec], workers=workers)
    assert tree(tmp_path / "pieces") == tree(tmp_path / "whole")


Json = st.recursive(
    st.none() | st.integers() | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=9,
)


@given_any(st.dictionaries(st.text(max_size=3), Json), st.booleans(), st.booleans())
def test_a_long_line_of_json_is_what_json_says(value, ascii, mark):
    line = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "replace")
    line = b"\xef\xbb\xbf" * mark + line

    def plain(value: Any) -> Any:
        """A value without `LongText`, half surrogate pairs, and lists, where they stay."""
        if isinstance(value, formats.LongText):
            value = value.utf8.decode()
        if isinstance(value, dict):
            return {plain(key): plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return len(value)
        return formats.whole_characters(value) if isinstance(value, str) else value

    with pytest.MonkeyPatch.context() as patch:
        for length in (1, 10):
            patch.setattr(formats, "LONG_BYTES", length)
            assert plain(formats._parse(line)) == plain(json.loads(line))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a\xffb"}', "it is not UTF-8: convert the file"),
        (b'{"text": "\\ud83d\\u12"}', "Invalid \\uXXXX escape"),
        (b'{"text": "a', "Unterminated string"),
        (b'{"text": "\x01"}', "Invalid control character"),
        ('{"t\u00e9xt": "a"}'.encode(), "no field 'text' (found: t\u00e9xt)"),
        ('{"text": ["\u00e9"]}'.encode(), "must be text"),
        ('["\u00e9"]'.encode(), "not a list"),
    ],
)
def test_a_long_line_that_is_none_is_refused(tmp_path, monkeypatch, line, reason):
    monkeypatch.setattr(formats, "LONG_BYTES", 1)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xc3\xa9"}\n' + line)
    refuse(web(tmp_path / "a.jsonl"), "a.jsonl:2: ", reason)


MEASURE = r"""
import json, re, resource, sys
from pathlib import Path
from nemo_rod.corpus import SourceSpec, load_tokenizer, prepare
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    spec = SourceSpec(name="a", role="replay", kind="jsonl", files=[str(folder / "a.jsonl")])
    prepare(folder / "blocks", [spec], tokenizer=load_tokenizer("byte"), block_size=4096,
            workers=int(sys.argv[2]))
    # not its ru_maxrss, which begins as that of the process that started it
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak) >> 10, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""


def write_long(file: Path, form: str) -> None:
    """Two documents of 100 MB; one emoji makes str take four bytes for each of its characters."""
    emoji = {"ascii": "fox ", "escaped": r"\ud83e\udd8a"}.get(form, "\N{FOX FACE}")
    twice = r"\u00e9\n" if form == "mixed" else "\\n"
    if form == "parquet":
        write_parquet(
            file, {"text": [f"the quick brown {emoji}" * 5_000_000] * 2}, row_group_size=2
        )
        return
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(2):
            lines.write('{"text": "' + f"the quick {twice}{emoji}" * 5_000_000 + '"}\n')


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ascii", "raw", "escaped", "mixed", "parquet"])
def test_a_document_of_100_megabytes_takes_less_than_600(tmp_path, form):
    program, kind = tmp_path / "program.py", "parquet" if form == "parquet" else "jsonl"
    program.write_text(MEASURE.replace("jsonl", kind))
    write_long(tmp_path / f"a.{kind}", form)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 600, done.stdout
    store = BlockStore(tmp_path / "blocks")
    assert len(store) > 2 * 15_000


def test_programs_without_a_main_guard_are_told_so(tmp_path):
    program = MEASURE.replace('if __name__ == "__main__":', "if True:").replace(
        "5_000_000", "9_000"
    )
    (tmp_path / "program.py").write_text(program)
    for command, given in (([str(tmp_path / "program.py")], None), (["-"], program)):
        done = subprocess.run(
            [sys.executable, *command, str(tmp_path), "2"],
            capture_output=True, text=True, input=given, check=False,
        )  # fmt: skip
        assert 'a file, with `if __name__ == "__main__":` before' in done.stderr.splitlines()[-1]
        assert "memory" not in done.stderr


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path):
    from transformers import PreTrainedTokenizerFast

    train_bpe(tmp_path, vocabulary=300)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 7000, "content": "<|far|>"})
    raw["model"]["vocab"]["<|far|>"] = 7000
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert len(PreTrainedTokenizerFast.from_pretrained(tmp_path)) < 300
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 7001
    assert tokenizer.encode_batch(["a <|far|>"])[0][-1] == 7000
    assert load_tokenizer(str(tmp_path), eod=7000).eod_id == 7000
    for eod in (5000, 7001):  # a hole, and beyond
        with pytest.raises(ValueError, match=rf"domain.eod={eod} is not an id .* largest is 7000"):
            load_tokenizer(str(tmp_path), eod=eod)
