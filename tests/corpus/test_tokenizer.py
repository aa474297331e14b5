"""Bytes, a real fast tokenizer, and what tells tokenizers apart."""

import io
import json
import pickle
import re
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import tokenizers
from corpus_cases import train_bpe
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_rod.corpus import SourceSpec, prepare
from nemo_rod.corpus.adapters.hub_tokenizer import HuggingFaceTokenizer
from nemo_rod.corpus.tokenizer import load_tokenizer

pytest.importorskip("transformers")
SPECIAL = "Ā ā \x01 ÿ 你好 🙂 \r\n\t <|endoftext|> <s> \u2028 \x7f\x80"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte")
    load_tokenizer("byte").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(exported):
    return HuggingFaceTokenizer(str(exported))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_bpe(tmp_path_factory.mktemp("bpe"), vocabulary=400)


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (256, 0)
    (ids,) = tokenizer.encode_batch(["aé\0b"])
    assert ids.tolist() == [97, 195, 169, 98] and ids.dtype == np.int32
    assert tokenizer.decode(ids) == "aéb"
    assert tokenizer.encode_batch([]) == []


def test_what_the_byte_tokenizer_does_is_pinned():
    # Block stores carry it: a change here would refuse every store that exists.
    assert load_tokenizer("byte").fingerprint == "3c64c385db0513758bc1111ae312aa60"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example(SPECIAL)
@example("".join(chr(code) for code in range(1, 0xD800)))  # every class of characters
def test_the_exported_byte_tokenizer_gives_the_same_ids(loaded, text):
    byte, text = load_tokenizer("byte"), text.replace("\0", "")
    (ids,) = byte.encode_batch([text])
    assert loaded.encode_batch([text])[0].tolist() == ids.tolist()
    assert loaded.decode(ids) == byte.decode(ids) == text


def test_autotokenizer_loads_the_export(exported):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(exported))
    assert tokenizer("hé").input_ids == [104, 195, 169]
    assert tokenizer.eos_token_id == 0 and len(tokenizer) == 256
    assert tokenizer.decode([104, 0, 105], skip_special_tokens=True).replace(" ", "") == "hi"


def test_fingerprints_tell_what_a_tokenizer_does_not_where_it_lies(exported, trained, tmp_path):
    byte, bpe = load_tokenizer("byte"), load_tokenizer(str(trained))
    assert load_tokenizer(str(exported)).fingerprint == byte.fingerprint
    assert bpe.fingerprint != byte.fingerprint
    copy = shutil.copytree(trained, tmp_path / "copy")
    assert load_tokenizer(str(copy)).fingerprint == bpe.fingerprint
    other = train_bpe(tmp_path / "other", vocabulary=262)
    assert load_tokenizer(str(other)).fingerprint != bpe.fingerprint
    bpe.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).fingerprint == bpe.fingerprint


def test_a_tokenizer_in_the_home_folder(trained, monkeypatch):
    monkeypatch.setenv("HOME", str(trained.parent))
    assert load_tokenizer(f"~/{trained.name}").vocab_size == load_tokenizer(str(trained)).vocab_size


def test_what_only_the_training_of_a_tokenizer_needs_is_left_out(trained, tmp_path):
    folder, own = shutil.copytree(trained, tmp_path / "own"), load_tokenizer(str(trained))
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["dropout"] = 0.5
    cut = {"max_length": 3, "stride": 0, "direction": "Right", "strategy": "LongestFirst"}
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"truncation": cut}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.fingerprint == own.fingerprint
    again = [tokenizer.encode_batch(["the cat sat on the mat"])[0].tolist() for _ in range(9)]
    assert again == [own.encode_batch(["the cat sat on the mat"])[0].tolist()] * 9


def test_a_tokenizer_is_loaded_without_torch(trained):
    here = load_tokenizer(str(trained), trust_remote_code=True)  # never in another process
    code = (
        "import sys; from nemo_rod.corpus import load_tokenizer; "
        f"t = load_tokenizer({str(trained)!r}); "
        "print(t.fingerprint, t.eod_id, t.vocab_size, sorted(t.special_ids)); "
        "assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys()"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stderr == ""
    same = (here.fingerprint, here.eod_id, here.vocab_size, sorted(here.special_ids))
    assert process.stdout.split("\n") == [" ".join(map(str, same)), ""]


@pytest.mark.parametrize(
    ("name", "what"),
    [("/nowhere/at/all", "does not exist"), ("no such name", r"cannot be loaded .*")],
)
def test_an_unknown_tokenizer_is_one_sentence(name, what, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"tokenizer '{name}' {what}: give \"byte\"") as e:
        load_tokenizer(name)
    assert "\n" not in str(e.value)


def test_the_end_of_a_document_can_be_another_token(trained):
    own, other = load_tokenizer(str(trained)), load_tokenizer(str(trained), eod=7)
    assert (own.eod_id, other.eod_id) == (0, 7)
    assert own.fingerprint != other.fingerprint
    assert load_tokenizer(str(trained), eod=0).fingerprint == own.fingerprint
    assert other.encode_batch(["the cat"])[0].tolist() == own.encode_batch(["the cat"])[0].tolist()
    size = own.vocab_size
    with pytest.raises(ValueError, match=rf"domain\.eod={size} is not an id .* which has {size}:"):
        load_tokenizer(str(trained), eod=size)
    assert load_tokenizer("byte", eod=0).fingerprint == load_tokenizer("byte").fingerprint
    with pytest.raises(ValueError, match=r"domain\.eod=1 does not fit domain\.tokenizer=byte"):
        load_tokenizer("byte", eod=1)


def test_code_beside_a_tokenizer_runs_only_when_asked_for(trained, tmp_path):
    folder, ran = shutil.copytree(trained, tmp_path / "own"), tmp_path / "ran"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\n"
        "class Mine(PreTrainedTokenizerFast): ...\n"
    )
    with pytest.raises(ValueError) as refusal:
        load_tokenizer(str(folder))
    assert str(refusal.value) == (
        f"tokenizer {str(folder)!r} comes with code of its own, which would run here: read that "
        "code and set model.trust_remote_code=true, or install a transformers that has its class."
    )
    assert not ran.exists()
    trusted = load_tokenizer(str(folder), trust_remote_code=True)
    assert ran.exists() and trusted.fingerprint == load_tokenizer(str(trained)).fingerprint


# Tokenizers like those of published models: what differs from a byte-level BPE, the class and the
# model type that they name, further settings, and the refusal; None: the ids are the file's.
THREES = r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+"
LIKE_PUBLISHED = [
    ("plain", {}, "PreTrainedTokenizerFast", "llama", {}, None),
    ("DeepSeek-R1-Distill-Llama", {"split": THREES}, "LlamaTokenizerFast", "llama", {}, None),
    ("DeepSeek-R1-Distill-Qwen", {"split": THREES}, "LlamaTokenizerFast", "qwen2", {}, None),
    ("DeepSeek-V3", {"split": THREES}, "LlamaTokenizerFast", "deepseek_v3", {}, None),
    ("OLMo 2", {"split": THREES}, "GPT2Tokenizer", "olmo2", {}, None),
    ("Qwen2 without NFC", {}, "Qwen2Tokenizer", "qwen2", {}, None),
    ("Pythia", {}, "GPTNeoXTokenizer", "gpt_neox", {}, None),
    ("Cohere", {"split": THREES}, "CohereTokenizer", "cohere", {}, None),
    ("a class from nowhere", {"split": THREES}, "HyperCLOVATokenizer", "llama", {}, None),
    ("a space first", {"prefix": True}, "GPT2Tokenizer", "gpt2", {}, None),
    ("names stay text", {}, "PreTrainedTokenizerFast", "llama", {"split_special_tokens": True},
     None),
    ("pads with a word", {}, "PreTrainedTokenizerFast", "llama", {"pad_token": "!"}, None),
    ("a name that it lacks", {}, "PreTrainedTokenizerFast", "llama", {"bos_token": "<s>"}, None),
    ("a file that is gone", {}, "LlamaTokenizerFast", "llama", {"tokenizer_file": "/x"}, None),
    ("other spaces", {}, "PreTrainedTokenizerFast", "llama",
     {"added_tokens_decoder": {"0": {"content": "<|end|>", "lstrip": True, "special": True}}},
     None),
    ("Llama 2", {"pieces": "Prepend"}, "LlamaTokenizer", "llama", {"legacy": False}, None),
    ("Yi", {"pieces": ""}, "LlamaTokenizer", "llama", {"legacy": True}, None),
    ("Gemma", {"pieces": ""}, "GemmaTokenizer", "gemma", {}, None),
    ("BERT", {"words": True}, "BertTokenizer", "bert", {"do_lower_case": True}, None),
    ("mT5", {"pieces": ""}, "T5Tokenizer", "t5", {"extra_ids": 0}, None),
    ("NLLB", {"pieces": "Prepend"}, "NllbTokenizerFast", "m2m_100", {}, None),
    ("Falcon", {"split": r"\p{N}"}, "PreTrainedTokenizerFast", "falcon", {}, None),
    ("CodeLlama", {"pieces": "Prepend"}, "CodeLlamaTokenizerFast", "llama", {}, None),
    ("Gemma over bytes", {}, "GemmaTokenizerFast", "gemma", {}, None),
    ("BERT, by default", {"words": False}, "BertTokenizer", "bert", {}, None),
    ("BERT, other case", {"words": True}, "BertTokenizer", "bert", {"do_lower_case": False},
     "contradicts itself: tokenizer_config.json has do_lower_case=false"),
    ("another space", {}, "GPT2Tokenizer", "gpt2", {"add_prefix_space": True},
     "contradicts itself: tokenizer_config.json has add_prefix_space=true"),
]  # fmt: skip
TEXTS = [
    "the cat sat on 12345 mats in 2023, e\u0301 é ﬁ", " lead", "two  spaces\n\n\tx\r\n", "",
    "don't I'LL", "東京 한국어 🙂‍🙂 שלום", "a <|end|>b <s>c</s>", "oh!! no!!",
]  # fmt: skip


def backend_like(split: str = "", prefix: bool = False, pieces: str | None = None, words: Any = ()):
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    unknown = "<unk>" if words == () else "[UNK]"
    special = ["<|end|>", unknown]
    if words != ():
        backend, trainer = Backend(models.WordPiece(unk_token=unknown)), trainers.WordPieceTrainer
        backend.normalizer = normalizers.BertNormalizer(lowercase=words)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif pieces is not None:
        spaces = [normalizers.Replace(" ", "▁")]
        backend = Backend(models.BPE(byte_fallback=True, unk_token=unknown))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁")] * bool(pieces) + spaces
        )
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
        trainer, special = trainers.BpeTrainer, special + [f"<0x{i:02X}>" for i in range(256)]
    else:
        backend, trainer = Backend(models.BPE()), trainers.BpeTrainer
        last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
        first = [pre_tokenizers.Split(Regex(split), behavior="isolated")] if split else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last]) if first else last
        backend.decoder = decoders.ByteLevel()
        special += pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 700, "special_tokens": special[:2], "show_progress": False}
    if trainer is trainers.BpeTrainer:
        options["initial_alphabet"] = [c for c in special if len(c) == 1]
        options["special_tokens"] = [c for c in special if len(c) > 1]
    backend.train_from_iterator((TEXTS[:-2] + TEXTS[-1:]) * 3, trainer(**options))
    return backend


@pytest.mark.parametrize(
    ("parts", "kind", "model_type", "settings", "refusal"),
    [row[1:] for row in LIKE_PUBLISHED],
    ids=[row[0] for row in LIKE_PUBLISHED],
)
def test_ids_are_those_of_the_file_whatever_class_it_names(
    parts, kind, model_type, settings, refusal, tmp_path
):
    file = tmp_path / "tokenizer.json"
    backend_like(**parts).save(str(file))
    config = {"tokenizer_class": kind, "eos_token": "<|end|>", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    load = partial(HuggingFaceTokenizer, trust_remote_code=True)  # in this process
    if refusal is not None:
        with pytest.raises(ValueError, match=re.escape(refusal)):
            load(str(tmp_path))
        return
    tokenizer = load(str(tmp_path))
    own = tokenizers.Tokenizer.from_file(str(file))
    own.encode_special_tokens = "split_special_tokens" in settings
    expected = [own.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == expected
    again = pickle.loads(pickle.dumps(tokenizer))
    assert [ids.tolist() for ids in again.encode_batch(TEXTS)] == expected
    assert tokenizer.vocab_size == own.get_vocab_size()
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = load(str(tmp_path / "saved"))
    assert [ids.tolist() for ids in saved.encode_batch(TEXTS)] == expected
    assert saved.fingerprint == tokenizer.fingerprint


def test_a_folder_without_a_vocabulary_is_no_tokenizer(tmp_path):
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"neither a tokenizer\.json nor tokenizer\.model"):
        HuggingFaceTokenizer(str(tmp_path), trust_remote_code=True)
    for pieces in ("tokenizer.model", "spm.model"):  # of sentencepiece, or of tiktoken
        (tmp_path / pieces).write_text("IQ== 0\nIg== 1\n")
        with pytest.raises(ValueError, match=f"comes as {pieces} alone, which"):
            HuggingFaceTokenizer(str(tmp_path), trust_remote_code=True)
        (tmp_path / pieces).unlink()


def test_a_vocabulary_alone_gets_no_tokens_of_its_class(tmp_path):
    model = json.loads(backend_like().to_str())["model"]
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    with pytest.raises(ValueError, match=r"tokens of Qwen2\w+ beside those of .*vocab\.json"):
        HuggingFaceTokenizer(str(tmp_path), trust_remote_code=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|endoftext|>": len(model["vocab"])}))
    tokenizer = HuggingFaceTokenizer(str(tmp_path), trust_remote_code=True)
    assert tokenizer.vocab_size == len(model["vocab"]) + 1


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("tokenizer.json", LFS, "tokenizer.json is not the data, but a pointer of Git LFS: run"),
        ("tokenizer.json", b"<html>404</html>", "tokenizer.json is not the data, but an HTML page"),
        ("tokenizer.model", LFS, "tokenizer.model is not the data, but a pointer of Git LFS: run"),
        ("tokenizer_config.json", b"Too Many Requests", "but a server's error: fetch the file"),
    ],
)
def test_what_stands_for_a_file_of_a_tokenizer_is_refused(trained, name, data, sentence, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "own")
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        HuggingFaceTokenizer(str(folder), trust_remote_code=True)


def test_an_end_that_no_file_gives_an_id_is_none(trained, tmp_path):
    """transformers would append it to the vocabulary, as an id that the base never met."""
    folder = shutil.copytree(trained, tmp_path / "own")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"eos_token": "<|new|>"}
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no EOS token in its files to end documents with"):
        load_tokenizer(str(folder))
    size = load_tokenizer(str(trained)).vocab_size
    config["added_tokens_decoder"] = {str(size): {"content": "<|new|>", "special": True}}
    file.write_text(json.dumps(config))
    assert load_tokenizer(str(folder)).eod_id == size


@pytest.mark.parametrize(
    ("file", "said", "sentence"),
    [
        ("special_tokens_map.json", {"eos_token": {"content": "!"}}, "the EOS token of tokenizer "),
        ("config.json", {"eos_token_id": 7}, "EOS is 0, that of config.json 7: set domain.eod to"),
        ("config.json", {"text_config": {"eos_token_id": [7, 8]}}, "that of config.json [7, 8]: "),
        ("generation_config.json", {"eos_token_id": [7, 0]}, ""),
        ("config.json", {"text_config": "x"}, ""),
    ],
)
def test_files_that_name_other_ends_are_not_silent(trained, file, said, sentence, tmp_path, capsys):
    folder = shutil.copytree(trained, tmp_path / "own")
    (folder / file).write_text(json.dumps(said))
    try:
        load_tokenizer(str(folder)).check(["the cat"])
    except ValueError as refusal:
        print(refusal, file=sys.stderr)
    load_tokenizer(str(folder), eod=5).check(["the cat"])
    said = capsys.readouterr().err
    assert sentence in said and said.count(": set domain.eod to the id") == bool(sentence)


def test_first_documents_are_compared_with_the_file(trained, tmp_path):
    """A file that changes after it was loaded stands for a loader that does not do as it says."""
    folder = shutil.copytree(trained, tmp_path / "own")
    tokenizer = load_tokenizer(str(folder))
    changed = json.loads((folder / "tokenizer.json").read_text())
    changed["normalizer"] = {"type": "Replace", "pattern": {"String": "qu"}, "content": "kw"}
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    (tmp_path / "text.jsonl").write_text('{"text": "the cat"}\n{"text": "queue"}\n' * 40)
    source = SourceSpec(name="s", role="replay", kind="jsonl", files=[str(tmp_path / "text.jsonl")])
    with pytest.raises(ValueError, match=r"cuts 'queue' into other tokens than .*tokenizer\.json"):
        prepare(tmp_path / "blocks", [source], tokenizer=tokenizer, block_size=16)
    assert not (tmp_path / "blocks" / "replay").exists()


LLAMA, OTHERS = {"tokenizer_class": "LlamaTokenizer"}, "into other tokens than"
LIKE_LLAMA = {
    "vocab_size": 400, "bos_id": 1, "eos_id": 2, "unk_id": 0, "pad_id": -1, "minloglevel": 2,
    "hard_vocab_limit": False, "model_type": "bpe", "byte_fallback": True, "split_digits": True,
    "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}  # fmt: skip
LIKE_GEMMA = {
    "add_dummy_prefix": False, "pad_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>",
    "user_defined_symbols": ["<mask>"],
}  # fmt: skip


@pytest.mark.examples  # the lane whose environment has sentencepiece
@pytest.mark.parametrize(
    ("trained", "config", "refusal"),
    [
        (LIKE_GEMMA, {"tokenizer_class": "GemmaTokenizer"}, ""),
        ({"add_dummy_prefix": False}, LLAMA | {"add_prefix_space": False}, ""),
        ({"add_dummy_prefix": False}, {}, ""),
        ({}, LLAMA, OTHERS), ({}, {}, OTHERS), ({"model_type": "unigram"}, LLAMA, OTHERS),
        ({}, LLAMA | {"legacy": False}, OTHERS), ({}, LLAMA | {"add_prefix_space": False}, OTHERS),
        ({"normalization_rule_name": "nmt_nfkc"}, LLAMA, OTHERS),
        ({"treat_whitespace_as_suffix": True}, LLAMA, OTHERS),
        ({}, {"tokenizer_class": "T5Tokenizer"}, "cannot be loaded from that folder"),
        ({"eos_piece": "<|end|>"}, LLAMA, "which the base never met"),
        ({}, LLAMA | {"pad_token": "<pad>"}, "which the base never met"),
    ],
)  # fmt: skip
def test_a_file_of_sentencepiece_alone_is_read_as_it_reads_it(trained, config, refusal, tmp_path):
    sentencepiece, out = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:-2] * 9), model_writer=out, **LIKE_LLAMA | trained
    )
    (tmp_path / "tokenizer.model").write_bytes(out.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    load = partial(HuggingFaceTokenizer, str(tmp_path), trust_remote_code=True)  # in this process
    if refusal:
        with pytest.raises(ValueError, match=re.escape(refusal)):
            load().check(TEXTS)
        return
    (ours := load()).check(TEXTS)
    own = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS[:-2])] == own.encode(TEXTS[:-2])
    assert (ours.eod_id, ours.vocab_size) == (own.eos_id(), len(own))
