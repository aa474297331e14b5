"""What a rehearsal finds wrong in a recipe before it makes anything, each with its sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from command_line import composed, nemo_rod

from nemo_rod.rehearsal.looks import (
    NotLooked,
    look_at_access,
    look_at_class,
    look_at_layout,
    look_at_separator,
    look_at_tokenizer,
)
from nemo_rod.rehearsal.special_tokens import special_tokens, write_tokenizer

NEMOTRON_3 = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"


def test_a_wrong_end_of_documents_is_found() -> None:
    qwen = composed("recipe=german_qwen3_5_4b")
    assert look_at_separator(qwen) == "id 248044, <|endoftext|>"
    config = composed("recipe=german_nemotron_3_nano_30b_a3b")
    config.domain.tokenizer = NEMOTRON_3
    assert look_at_separator(config) == "id 2, </s>"  # the recipe says so
    config.domain.eod = None
    with pytest.raises(ValueError) as refused:
        look_at_separator(config)
    assert str(refused.value) == (
        "Documents would end with id 11 (<|im_end|>), but in the pretraining of "
        f"{NEMOTRON_3} they ended with id 2 (</s>): set domain.eod=2."
    )


def test_a_tokenizer_of_another_model_is_found() -> None:
    config = composed("recipe=german_qwen3_5_4b", "domain.tokenizer=Qwen/Qwen3-0.6B-Base")
    with pytest.raises(ValueError) as refused:
        look_at_tokenizer(config)
    assert str(refused.value) == (
        "domain.tokenizer=Qwen/Qwen3-0.6B-Base is the tokenizer of another model than "
        "model.hf=Qwen/Qwen3.5-4B-Base (<|endoftext|> is id 151643, the model has it at 248044): "
        "its ids mean other text to the model; set domain.tokenizer=${model.hf}."
    )
    config.domain.tokenizer = NEMOTRON_3  # no token in common
    with pytest.raises(ValueError, match="of another model"):
        look_at_tokenizer(config)


def test_renamed_special_tokens_have_to_be_accepted() -> None:
    config = composed("recipe=german_nemotron_3_nano_30b_a3b")
    assert look_at_tokenizer(config).endswith(f"with the ids of {NEMOTRON_3}")
    config.model.special_tokens = "same"
    with pytest.raises(ValueError, match=r"\(<SPECIAL_10>, .*set model\.special_tokens=renamed"):
        look_at_tokenizer(config)


def test_a_tokenizer_in_a_folder_is_read(tmp_path: Path) -> None:
    write_tokenizer(special_tokens(NEMOTRON_3), tmp_path)
    found = special_tokens(str(tmp_path))
    assert found.eos == "<|im_end|>" and found.ids["<|im_end|>"] == 11
    assert found.separator == "</s>"  # what its EOS does not say
    assert found.small_ids()["</s>"] == 2


def test_the_recipes_of_other_runs_are_found(tmp_path: Path) -> None:
    run = ("recipe=german_qwen3_5_9b", f"run_dir={tmp_path}/run", "dry_run=true")
    found = nemo_rod("rehearse", *run)
    assert "other runs: german_qwen3_5_4b" in found.stdout, found.stderr
    assert found.returncode == 0 and not [*tmp_path.iterdir()]
    variant = "variants.rod_transfer.curriculum=runs/thesis"
    found = nemo_rod("rehearse", *run, variant, "arms=[rod_transfer]")
    assert found.returncode == 1
    assert "other runs: runs/thesis names no recipe, so the run that it holds" in found.stdout


def test_a_layout_that_does_not_divide_is_found() -> None:
    config = composed("recipe=german_qwen3_5_4b")
    config.parallel.pipeline = 3
    with pytest.raises(ValueError, match="pipeline=3 x virtual_pipeline=1 does not divide the 32"):
        look_at_layout(config)
    assert look_at_layout(composed("recipe=german_qwen3_5_4b")).startswith("8 B200 on 1 node")


def test_a_class_that_cannot_be_loaded_is_found(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = composed("recipe=german_qwen3_5_4b", f"model.hf={tmp_path}")
    with pytest.raises(NotLooked):
        look_at_class(config)
    described = {"architectures": ["FancyForCausalLM"], "model_type": "fancy"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="is of the class FancyForCausalLM, which the installed"):
        look_at_class(config)
    (tmp_path / "config.json").write_text(json.dumps({**described, "auto_map": {}}))
    with pytest.raises(ValueError, match=r"or set model\.trust_remote_code=true"):
        look_at_class(config)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert look_at_class(config) == "Qwen3ForCausalLM"


class Hub(BaseHTTPRequestHandler):
    """Answers what the hub answers about access: one gated dataset, one that it does not know."""

    def do_GET(self) -> None:
        for name, status, code in (
            ("Nemotron-CC-v2", 403, "GatedRepo"),
            ("finewiki", 404, "RepoNotFound"),
        ):
            if name in self.path:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.end_headers()
                return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

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


def test_a_missing_token_for_a_gated_set_is_found(hub: None) -> None:
    config = composed("recipe=german_qwen3_5_4b")
    sources = config.domain.sources
    config.domain.sources = {name: sources[name] for name in ("web", "pdf")}
    with pytest.raises(ValueError) as refused:
        look_at_access(config)
    assert str(refused.value) == (
        "The dataset nvidia/Nemotron-CC-v2 is gated, and this account may not read it: accept its "
        "terms on the hub, and set HF_TOKEN to a token of that account."
    )
    config.domain.sources = {name: sources[name] for name in ("wikipedia",)}
    with pytest.raises(ValueError, match="knows no dataset HuggingFaceFW/finewiki"):
        look_at_access(config)
    config.domain.sources = {name: sources[name] for name in ("pdf",)}
    assert look_at_access(config) == "2 repositories of the hub can be read"


def test_without_a_network_access_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_api = pytest.importorskip("huggingface_hub.hf_api")
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    with pytest.raises(NotLooked, match="the hub does not answer"):
        look_at_access(composed("recipe=german_qwen3_5_4b"))
