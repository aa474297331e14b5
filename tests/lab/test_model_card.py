"""The model card in every checkpoint of a run."""

from dataclasses import replace

import pytest
from made_up_run import recipe

from nemo_rod.lab.report.build_report import judged_results
from nemo_rod.lab.report.model_card import write_model_cards
from nemo_rod.lab.report.run_files import read_run


def test_cards_say_what_a_model_was_made_of(run_dir):
    card_of = pytest.importorskip("huggingface_hub").ModelCard.load
    results, config = judged_results(read_run(run_dir)), recipe(run_dir)
    config.model.hf = str(run_dir / "base" / "hf")
    hub = {"kind": "huggingface", "role": "replay"}
    places = {"chain_0": "a/<img src=x>|`b`", "chain_1": str(run_dir / "blocks")}
    sources = config.domain.sources | {name: hub | {"path": p} for name, p in places.items()}
    config.domain = replace(config.domain, sources=sources)
    cards = write_model_cards(config, results)
    names = {card.parent.parent.name for card in cards}
    assert names == {"no_replay", "fixed_32", "merge_0.6", "rod"}
    for card in cards:
        loaded, text = card_of(card), card.read_text()
        assert loaded.data.library_name == "transformers"
        assert str(run_dir.parent) not in text  # which is published, and no path of a machine
        assert "Wall time" not in text  # a run that was killed makes the same checkpoints
        arm = results["arms"][card.parent.parent.name]
        assert f"| Adaptation loss (nats) | {arm['adapt_loss']:.3f} |" in text
        assert "| dialect | adaptation | " in text and "| chain_0 | replay | " in text
        assert "Made of hf by" in text and r" | a/&lt;img src=x&gt;\|\`b\` |" in text
    first, second, *_ = cards
    first.write_text("my own")
    second.write_text(second.read_text().replace("## Use", "## How"))  # made again
    write_model_cards(recipe(run_dir), results)
    assert first.read_text() == "my own" and "## Use" in second.read_text()
