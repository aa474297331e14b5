"""Checks of a recipe before a rehearsal makes anything: every problem has its sentence."""

import dataclasses
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from command_line import composed
from hydra import initialize_config_dir

from nemo_rod.config import Config
from nemo_rod.corpus.adapters.hub_files import file_of
from nemo_rod.files import write_json
from nemo_rod.installation import config_folder
from nemo_rod.lab.rehearsal.command import rehearse
from nemo_rod.lab.rehearsal.preflight import (
    check_access,
    check_class,
    check_recipe,
    check_separator,
)
from nemo_rod.run import hub as the_hub
from nemo_rod.run.hub import NotChecked

QWEN = "recipe=german_qwen3_5_4b"
ENDS = {"<|endoftext|>": 7, "<|im_end|>": 8}


@pytest.mark.parametrize("where", ["folder", "cache"])
def test_a_wrong_end_of_documents_is_refused(where, tmp_path, monkeypatch):
    name, folder = str(tmp_path), tmp_path
    if where == "cache":  # where the hub's library keeps what it has downloaded
        pytest.importorskip("huggingface_hub")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        name, repository = "some/model", tmp_path / "models--some--model"
        folder = repository / "snapshots" / "c0ffee"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("c0ffee")
    config = composed(QWEN, f"domain.tokenizer={name}")
    added = [{"content": token, "id": number, "special": True} for token, number in ENDS.items()]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", {"added_tokens": added})
    with pytest.raises(NotChecked, match=f"tokenizer.json of {name} is not on this machine"):
        check_separator(config)  # half of a download
    write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    with pytest.raises(ValueError) as refused:  # a chat model's EOS
        check_separator(config)
    assert str(refused.value) == (
        "Documents would end with id 8 (<|im_end|>), but in the pretraining of Qwen/Qwen3.5-4B-Base"
        " they ended with id 7 (<|endoftext|>): set domain.eod=7."
    )
    config.domain.eod = 7
    assert check_separator(config) == "id 7, <|endoftext|>"
    config.model.hf, config.domain.eod = "some/other", 3  # whose separator is not guessed
    with pytest.raises(NotChecked, match=r"end with id 3 \(an ordinary token\); the sep.* not"):
        check_separator(config)


def test_what_a_run_would_refuse_is_refused_before_a_rehearsal(tmp_path):
    mine = {"role": "adaptation", "kind": "text", "files": [f"{tmp_path}/*.txt"]}
    old = {**mine, "role": "replay"}
    config = with_sources(composed("recipe=toy_synthetic", "parallel=single"), new=mine, old=old)
    with pytest.raises(ValueError, match=r"source new: .*\*\.txt"):
        check_recipe(config)
    (tmp_path / "a.txt").write_text("Größe")
    assert check_recipe(config) == "nothing is lacking here"
    config.cluster.gpu = "H100"
    with pytest.raises(NotChecked, match="torch sees no GPU on this machine"):
        check_recipe(config)


def with_sources(config: Config, **sources: Any) -> Config:
    config.domain = dataclasses.replace(config.domain, sources=sources)
    return config


def test_recipes_of_other_runs_are_named(tmp_path, capsys):
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


def test_a_class_that_cannot_be_loaded_is_refused(tmp_path):
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
def hub(monkeypatch):
    hf_api = pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hf_api.api, "endpoint", f"http://127.0.0.1:{server.server_port}")
    the_hub._answer.cache_clear()
    yield
    the_hub._answer.cache_clear()
    server.shutdown()
    server.server_close()


def test_a_missing_token_for_a_gated_set_is_named(hub):
    def access(*names: str) -> str:
        config = composed(QWEN)
        return check_access(with_sources(config, **{n: config.domain.sources[n] for n in names}))

    with pytest.raises(ValueError) as refused:
        access("web", "pdf")
    assert str(refused.value) == (
        "domain.sources.web.path: The dataset nvidia/Nemotron-CC-v2 is gated, and this account may "
        "not read it: accept its terms on the hub, and set HF_TOKEN to a token of that account."
    )
    with pytest.raises(ValueError, match="has no dataset HuggingFaceFW/finewiki"):
        access("wikipedia")
    assert access("pdf") == "2 repositories of the hub can be read"


def test_without_a_network_access_is_not_checked(monkeypatch):
    hf_api = pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    the_hub._answer.cache_clear()
    with pytest.raises(NotChecked, match="the hub does not answer"):
        check_access(composed(QWEN))
    the_hub._answer.cache_clear()


def test_without_the_hubs_library_no_file_is_known_and_fetching_one_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert file_of("some/model", "config.json") is None
    with pytest.raises(ModuleNotFoundError, match="huggingface_hub"):
        file_of("some/model", "config.json", fetch=True)
