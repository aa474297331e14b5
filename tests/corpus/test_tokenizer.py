"""Bytes, a real fast tokenizer, and what tells tokenizers apart."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpus_cases import train_bpe
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_rod.corpus.adapters import load_tokenizer
from nemo_rod.corpus.adapters.hub_tokenizer import HuggingFaceTokenizer
from nemo_rod.corpus.tokenizer import Tokenizer

pytest.importorskip("transformers")
SPECIAL = "Ā ā \x01 ÿ 你好 🙂 \r\n\t <|endoftext|> <s> \u2028 \x7f\x80"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte")
    load_tokenizer("byte").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(exported: Path) -> Tokenizer:
    return HuggingFaceTokenizer(str(exported))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("bpe"), vocabulary=400)


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (256, 0)
    (ids,) = tokenizer.encode_batch(["aé\0b"])
    assert ids.tolist() == [97, 195, 169, 98] and ids.dtype == np.int32
    assert tokenizer.decode(ids) == "aéb"
    assert tokenizer.encode_batch([]) == []


def test_what_the_byte_tokenizer_does_is_pinned() -> None:
    # Block stores carry it: a change here would refuse every store that exists.
    assert load_tokenizer("byte").fingerprint == "3c64c385db0513758bc1111ae312aa60"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example(SPECIAL)
@example("".join(chr(code) for code in range(1, 0xD800)))  # every class of characters
def test_the_exported_byte_tokenizer_gives_the_same_ids(loaded: Tokenizer, text: str) -> None:
    byte, text = load_tokenizer("byte"), text.replace("\0", "")
    (ids,) = byte.encode_batch([text])
    assert loaded.encode_batch([text])[0].tolist() == ids.tolist()
    assert loaded.decode(ids) == byte.decode(ids) == text


def test_autotokenizer_loads_the_export(exported: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(exported))
    assert tokenizer("hé").input_ids == [104, 195, 169]
    assert tokenizer.eos_token_id == 0 and len(tokenizer) == 256
    assert tokenizer.decode([104, 0, 105], skip_special_tokens=True).replace(" ", "") == "hi"


def test_fingerprints_tell_what_a_tokenizer_does_not_where_it_lies(
    exported: Path, trained: Path, tmp_path: Path
) -> None:
    byte, bpe = load_tokenizer("byte"), load_tokenizer(str(trained))
    assert load_tokenizer(str(exported)).fingerprint == byte.fingerprint
    assert bpe.fingerprint != byte.fingerprint
    copy = shutil.copytree(trained, tmp_path / "copy")
    assert load_tokenizer(str(copy)).fingerprint == bpe.fingerprint
    other = train_bpe(tmp_path / "other", vocabulary=262)
    assert load_tokenizer(str(other)).fingerprint != bpe.fingerprint
    bpe.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).fingerprint == bpe.fingerprint


def test_a_fast_tokenizer_gives_what_the_library_gives(trained: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(trained))
    tokenizer = load_tokenizer(str(trained))
    texts = ["the cat's hat", "", SPECIAL, "ate <|end|> the"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == reference(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.eod_id == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)


def test_a_tokenizer_in_the_home_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(trained.parent))
    assert load_tokenizer(f"~/{trained.name}").vocab_size == load_tokenizer(str(trained)).vocab_size


def test_what_only_the_training_of_a_tokenizer_needs_is_left_out(
    trained: Path, tmp_path: Path
) -> None:
    folder, own = shutil.copytree(trained, tmp_path / "own"), load_tokenizer(str(trained))
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["dropout"] = 0.5
    cut = {"max_length": 3, "stride": 0, "direction": "Right", "strategy": "LongestFirst"}
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"truncation": cut}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.fingerprint == own.fingerprint
    again = [tokenizer.encode_batch(["the cat sat on the mat"])[0].tolist() for _ in range(9)]
    assert again == [own.encode_batch(["the cat sat on the mat"])[0].tolist()] * 9


def test_a_tokenizer_is_loaded_without_torch(trained: Path) -> None:
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


def test_tokenizers_travel_to_other_processes(trained: Path) -> None:
    for name in ("byte", str(trained)):
        tokenizer = load_tokenizer(name)
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode_batch(["the cat"])[0].tolist() == (
            tokenizer.encode_batch(["the cat"])[0].tolist()
        )


@pytest.mark.parametrize(
    ("name", "what"),
    [("/nowhere/at/all", "does not exist"), ("no such name", r"cannot be loaded .*")],
)
def test_an_unknown_tokenizer_is_one_sentence(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"tokenizer '{name}' {what}: give \"byte\"") as e:
        load_tokenizer(name)
    assert "\n" not in str(e.value)


def test_a_tokenizer_without_an_end_is_refused(trained: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    endless = PreTrainedTokenizerFast(tokenizer_file=str(trained / "tokenizer.json"))
    endless.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no EOS token .*: set domain\.eod to the id"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), eod=3).eod_id == 3


def test_the_end_of_a_document_can_be_another_token(trained: Path) -> None:
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


def test_code_beside_a_tokenizer_runs_only_when_asked_for(trained: Path, tmp_path: Path) -> None:
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
