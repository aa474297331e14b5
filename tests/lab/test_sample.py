"""`nemo-rod inspect prompt=`, on a small checkpoint in a run's folder."""

import re
import shutil

import pytest
from made_up_run import recipe
from sandbox import time_limit

from nemo_rod import cli
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.report.completions import complete
from nemo_rod.lab.text import printable_lines
from nemo_rod.run.stages import Stages


def test_a_prompt_is_continued_by_the_likeliest_tokens(run_dir, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    shutil.rmtree(run_dir / "arms" / "rod" / "hf")
    model.save_pretrained(run_dir / "arms" / "rod" / "hf")
    ids = list(b"a b")
    for _ in range(6):  # the oracle: one token at a time, without a cache
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 0:
            break
    capsys.readouterr()

    def sample(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["nemo-rod", "inspect", str(run_dir), *words])
        cli.main()
        return capsys.readouterr().out

    expected = bytes(i for i in ids if i).decode(errors="replace")
    assert sample("prompt=a b", "tokens=6") == f"--- rod\n{expected}\n"
    for words, error in (
        (("prompt=a", "arm=rdo"), r"arm=rdo has no checkpoint in .* \(did you mean rod\?\)"),
        (("prompt=",), "prompt='' has no token"),
        (("prompt=a", "tokens=0"), "tokens=0 is not valid"),
    ):
        with pytest.raises(SystemExit) as end:
            sample(*words)
        assert end.value.code == 2
        shown = capsys.readouterr().err
        assert re.search(error, shown), shown

    file = run_dir / "arms" / "rod" / "hf" / "config.json"
    sound = read_json(file)
    for change in ({"num_hidden_layers": 10**7}, {"vocab_size": 10**11}, {"hidden_size": 10**6}):
        write_json(file, sound | change)  # days, or all memory
        with pytest.raises(SystemExit), time_limit(60):
            sample("prompt=a")
        assert "describes a far larger model than the" in capsys.readouterr().err
    write_json(file, sound)

    # the page's completions, by the same models and once only
    results = {"arms": {"rod": {}}, "reference_arm": None}
    assert complete(Stages(recipe(run_dir)), results) == []  # a smoke test
    by_user = Stages(recipe(run_dir, "report.prompts=[a b]"))
    (row,) = complete(by_user, results)
    assert (row["arm"], row["source"], row["prompt"]) == ("rod", None, "a b")
    shown = sample("prompt=a b", "tokens=48").removeprefix("--- rod\na b")[:-1]
    assert printable_lines(row["text"]) == shown
    rows = complete(Stages(recipe(run_dir, "report.smoke_test=false")), results)
    held_out = BlockStore(run_dir / "blocks", split="holdout")
    firsts = {s.role: s.name for s in reversed(held_out.sources)}
    assert [row["source"] for row in rows] == [firsts["adaptation"], firsts["replay"]]
    write_json(run_dir / "report" / "results.json", {"completions": [row]})
    (run_dir / "arms" / "rod" / "hf" / "model.safetensors").unlink()
    assert complete(by_user, results) == [row]  # kept: nothing is loaded
