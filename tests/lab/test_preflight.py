"""Checks of a recipe before a rehearsal makes anything: every problem has its sentence."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import composed
from hydra import initialize_config_dir

from nemo_rod.config import Config, config_folder
from nemo_rod.lab.rehearsal import preflight
from nemo_rod.lab.rehearsal.command import rehearse
from nemo_rod.lab.rehearsal.preflight import (
    NotChecked,
    check_access,
    check_class,
    check_documents,
    check_layout,
    check_separator,
    check_tokenizer,
)
from nemo_rod.lab.rehearsal.special_tokens import SpecialTokens, special_tokens, write_tokenizer

NEMOTRON_3 = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"


QWEN = "recipe=german_qwen3_5_4b"


def test_a_wrong_end_of_documents_is_refused() -> None:
    assert check_separator(composed(QWEN)) == "id 248044, <|endoftext|>, as known here, not read"
    config = composed("recipe=german_nemotron_3_nano_30b_a3b")
    config.domain.tokenizer = NEMOTRON_3
    # the recipe names the id
    assert check_separator(config) == "id 2, </s>, as known here, not read"
    config.domain.eod = None
    with pytest.raises(ValueError) as refused:
        check_separator(config)
    assert str(refused.value) == (
        "Documents would end with id 11 (<|im_end|>), but in the pretraining of "
        f"{NEMOTRON_3} they ended with id 2 (</s>, as known here, not read): set domain.eod=2."
    )


def test_a_tokenizer_of_another_model_is_refused() -> None:
    config = composed(QWEN, "domain.tokenizer=Qwen/Qwen3-0.6B-Base")
    with pytest.raises(ValueError) as refused:
        check_tokenizer(config)
    assert str(refused.value) == (
        "domain.tokenizer=Qwen/Qwen3-0.6B-Base is the tokenizer of another model than "
        "model.hf=Qwen/Qwen3.5-4B-Base (<|endoftext|> is id 151643, the model has it at 248044, as "
        "known here, not read): its ids mean other text to the model; set "
        "domain.tokenizer=${model.hf}."
    )
    config.domain.tokenizer = NEMOTRON_3  # no token in common
    with pytest.raises(ValueError, match="of another model"):
        check_tokenizer(config)


def test_renamed_special_tokens_have_to_be_accepted() -> None:
    config = composed("recipe=german_nemotron_3_nano_30b_a3b")
    assert check_tokenizer(config) == (
        "nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base, with the ids of "
        f"{NEMOTRON_3}, as known here, not read"
    )
    config.model.special_tokens = "same"
    with pytest.raises(ValueError, match=r"\(<SPECIAL_10>, .*set model\.special_tokens=renamed"):
        check_tokenizer(config)


def test_a_tokenizer_in_a_folder_is_read(tmp_path: Path) -> None:
    write_tokenizer(special_tokens(NEMOTRON_3), tmp_path)
    tokens = special_tokens(str(tmp_path))
    assert tokens.eos == "<|im_end|>" and tokens.ids["<|im_end|>"] == 11
    assert tokens.separator == "</s>"  # which is not its EOS
    assert tokens.small_ids()["</s>"] == 2


def in_the_cache(name: str, tokens: SpecialTokens, cache: Path) -> None:
    """Puts a tokenizer where the hub's library keeps what it has downloaded."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    folder = repository / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    added = [{"content": t, "id": i, "special": True} for t, i in tokens.ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokens.eos}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_tokenizer_in_the_hubs_cache_precedes_the_table(cache: Path) -> None:
    own, other = "Qwen/Qwen3.5-4B-Base", "Qwen/Qwen3.5-9B-Base"
    config = composed(QWEN, f"domain.tokenizer={other}")
    assert check_tokenizer(config) == f"{other}, with the ids of {own}, as known here, not read"
    tokens = special_tokens(own)
    in_the_cache(own, tokens, cache)
    assert check_tokenizer(config).endswith("not read")  # one of the two was not
    in_the_cache(other, tokens, cache)
    assert check_tokenizer(config) == f"{other}, with the ids of {own}"
    assert check_separator(config) == "id 248044, <|endoftext|>"
    # if a publisher changes a token, the cache counts, not the table
    shutil.rmtree(cache / "models--Qwen--Qwen3.5-9B-Base")
    moved = {name: number + 1 for name, number in tokens.ids.items()}
    in_the_cache(other, SpecialTokens(moved, "<|im_end|>", None), cache)
    with pytest.raises(ValueError, match="is id 248045, the model has it at 248044\\)"):
        check_tokenizer(config)
    with pytest.raises(ValueError) as refused:  # the separator of the table is not its EOS
        check_separator(config)
    assert str(refused.value) == (
        "Documents would end with id 248047 (<|im_end|>), but in the pretraining of Qwen/Qwen3.5"
        "-4B-Base they ended with id 248045 (<|endoftext|>): set domain.eod=248045."
    )


def test_half_a_tokenizer_in_the_cache_is_not_read(cache: Path) -> None:
    name = "Qwen/Qwen3.5-4B-Base"
    in_the_cache(name, special_tokens(name), cache)
    (file,) = cache.rglob("tokenizer_config.json")
    file.unlink()
    assert not special_tokens(name).was_read
    with pytest.raises(ValueError, match="tokens of /not/there are not known"):
        special_tokens("/not/there")


def test_the_separator_of_an_unknown_model_is_not_guessed(cache: Path) -> None:
    tokens = SpecialTokens({"<end>": 7, "<stop>": 8}, "<stop>", None)
    in_the_cache("some/model", tokens, cache)
    config = composed(QWEN, "model.hf=some/model")
    with pytest.raises(NotChecked, match=r"end with id 8 \(<stop>\); the separator .* not known"):
        check_separator(config)
    config.domain.eod = 7  # on purpose
    with pytest.raises(NotChecked, match=r"end with id 7 \(<end>\); the separator in"):
        check_separator(config)


def dataset(folder: Path, *records: dict[str, str]) -> str:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def with_sources(**sources: dict[str, str]) -> Config:
    config = composed(QWEN)
    shared = {"role": "replay", "kind": "huggingface"}
    set_sources(config, {name: {**shared, **keys} for name, keys in sources.items()})
    return config


def set_sources(config: Config, sources: dict[str, Any]) -> None:
    config.domain = dataclasses.replace(config.domain, sources=sources)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"text_field": "text"},
            "source news: {path}, row 1: no field 'text' (found: body, language): set text_field "
            "or filter to one of those",
        ),
        ({"filter": 'lang == "de"'}, "source news: {path}, row 1: no field 'lang'"),
        ({"split": "test"}, "source news: dataset news[default,test]@main cannot be opened"),
        ({"subset": "web"}, "source news: dataset news[web,train]@main cannot be opened"),
        (
            {"filter": 'language == "fr"'},
            "source news: no record of {path} is a document: correct its subset, split or filter",
        ),
    ],
)
def test_a_source_without_a_document_is_refused(
    keys: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    path = dataset(tmp_path / "news", {"body": "Größe", "language": "de"})
    right = {"path": path, "text_field": "body", "filter": 'language == "de"'}
    assert check_documents(with_sources(news=right)) == (
        "the first document of 1 of 1 datasets was read"
    )
    with pytest.raises(ValueError) as refused:
        check_documents(with_sources(first=right, news={**right, **keys}))
    assert str(refused.value).startswith(sentence.format(path=path))


def test_documents_out_of_reach_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    hf_api = pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    here = {"path": dataset(tmp_path / "news", {"text": "Größe"})}
    config = with_sources(remote={"path": "some/dataset"}, news=here)
    with pytest.raises(NotChecked, match="of 1 of 2 datasets was read; remote: the hub does not"):
        check_documents(config)
    sources = config.domain.sources
    sources["news"]["text_field"] = "body"  # what is here is still checked
    set_sources(config, sources)
    with pytest.raises(ValueError, match="no field 'body'"):
        check_documents(config)


def test_the_search_for_a_document_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    none = [{"text": "Größe", "language": "de"}] * preflight.RECORDS
    config = with_sources(
        news={"path": dataset(tmp_path / "news", *none), "filter": 'language == "fr"'}
    )
    with pytest.raises(NotChecked, match=r"0 of 1 .*; news: its filter drops the first 1,000 rec"):
        check_documents(config)
    answer = threading.Event()

    class Silent:
        def records(self, _: None) -> Iterator[str]:
            answer.wait()
            yield "late"

    monkeypatch.setattr(preflight, "open_inputs", lambda _: [Silent()])
    unread = preflight.first_documents(config.domain.specs, seconds=0.1)
    answer.set()
    assert unread == {"news": "not read within 0.1 seconds"}


def test_recipes_of_other_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("recipe=german_qwen3_5_9b", f"run_dir={tmp_path}/run", "dry_run=true")
    variant = "variants.rod_transfer.curriculum=runs/thesis"
    unknown, known = composed(*run, variant, "arms=[rod_transfer]"), composed(*run)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        rehearse(known)
        assert "other runs: german_qwen3_5_4b" in capsys.readouterr().out
        failed = "rehearsal of german_qwen3_5_9b failed at other runs"
        with pytest.raises(RuntimeError, match=failed):
            rehearse(unknown)
    output = capsys.readouterr().out
    assert "other runs: runs/thesis names no recipe, so the run that it holds" in output
    assert not [*tmp_path.iterdir()]


def test_a_layout_that_does_not_divide_is_refused() -> None:
    config = composed(QWEN)
    config.parallel.pipeline = 3
    with pytest.raises(ValueError, match="pipeline=3 x virtual_pipeline=1 does not divide num_hid"):
        check_layout(config)
    assert check_layout(composed(QWEN)).startswith("8 B200 on 1 node")


def test_a_class_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    config = composed(QWEN, f"model.hf={tmp_path}")
    with pytest.raises(NotChecked):
        check_class(config)
    fancy = {"architectures": ["FancyForCausalLM"], "model_type": "fancy"}
    for described, sentence in (
        (fancy, "is of the class FancyForCausalLM, which the installed"),
        ({**fancy, "auto_map": {}}, r"or set model\.trust_remote_code=true"),
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            "MixtralForCausalLM, which the installed Megatron-Bridge does not convert: choose",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ValueError, match=sentence):
            check_class(config)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert check_class(config) == "Qwen3ForCausalLM"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does about access: one dataset is gated, one does not exist."""

    def do_GET(self) -> None:
        refusals = {"Nemotron-CC-v2": (403, "GatedRepo"), "finewiki": (404, "RepoNotFound")}
        status, code = next((r for name, r in refusals.items() if name in self.path), (200, ""))
        self.send_response(status)
        self.send_header("X-Error-Code" if code else "Content-Type", code or "application/json")
        self.end_headers()
        self.wfile.write(b"" if code else b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hf_api = pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hf_api.api, "endpoint", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def test_a_missing_token_for_a_gated_set_is_named(hub: None) -> None:
    def access(*names: str) -> str:
        config = composed(QWEN)
        set_sources(config, {name: config.domain.sources[name] for name in names})
        return check_access(config)

    with pytest.raises(ValueError) as refused:
        access("web", "pdf")
    assert str(refused.value) == (
        "The dataset nvidia/Nemotron-CC-v2 is gated, and this account may not read it: accept its "
        "terms on the hub, and set HF_TOKEN to a token of that account."
    )
    with pytest.raises(ValueError, match="has no dataset HuggingFaceFW/finewiki"):
        access("wikipedia")
    assert access("pdf") == "2 repositories of the hub can be read"


def test_without_a_network_access_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_api = pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    with pytest.raises(NotChecked, match="the hub does not answer"):
        check_access(composed(QWEN))
