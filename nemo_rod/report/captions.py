"""Titles and captions of the figures, in the order of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rod.report.paper import paper_arms

Results = Mapping[str, Any]

TITLES = {
    "frontier": "Adaptation against forgetting",
    "replay_share": "How much is replayed, what, and when",
    "scores": "The two demands that compete",
    "forgetting_profile": "Who is protected",
    "sampling_ratio": "Who is replayed",
    "capabilities": "What tasks say",
    "components": "Which part brings the gain",
    "pool_size": "How many candidates",
    "weighting": "The weight of replay",
    "budgets": "Longer training",
    "transfer": "With a smaller model's help",
    "seeds": "Over seeds",
    "settings_frontier": "Settings: adaptation against forgetting",
    "settings_replay_share": "Settings: what is replayed, and when",
    "settings_scores": "Settings: the two demands",
    "settings_forgetting_profile": "Settings: who is protected",
    "settings_sampling_ratio": "Settings: who is replayed",
}
_CAPTIONS = {
    "frontier": "Towards the lower left is better. The blue line is the chord: what fixed "
    "replay would reach at shares between those that were run, straight in ln F_val as on "
    "this axis. The dashed line is RoD's distance from it at equal "
    "forgetting.{base}{replicates}{paper}",
    "replay_share": "Bands are replay sources, or the paper's categories of them; the line "
    "is their sum: the replay share of the trained batch. Dots are means over tenths of the"
    " run, in percent. 1\N{MULTIPLICATION SIGN} and 2\N{MULTIPLICATION SIGN} mark where as "
    "many adaptation blocks were trained on as there are, once and twice.",
    "scores": "Mean score of the adaptation candidates (what is left to learn), of the "
    "replay candidates (what has been forgotten), and the score of the last block that "
    "still got a place.",
    "forgetting_profile": "One point per replay source and arm. The dotted diagonal is no "
    "replay at all; a flat line protects most those sources that would be forgotten most. "
    "Broken lines are the fits without {without}, whose no-replay forgetting lies farthest "
    "from the mean.",
    "sampling_ratio": "How much more often than it was offered each source was trained on. "
    "RoD follows the forgetting that is left under replay; a source that is forgotten badly"
    " but recovers from a few blocks needs little of it, which weakens the relation with "
    "no-replay forgetting.",
    "capabilities": "Accuracy less the base model's, by capability; zero keeps all of it.{marks}",
    "components": "Triangles have RoD's mean share of replay in every batch and choose new "
    "blocks and replay at random or by score. Those that point down repeat RoD's recorded "
    "share at every step, in all or by source, with blocks drawn at random: how much and "
    "when, but not which.",
    "pool_size": "With m candidates per trained block. Below m = 2, half of which are new, "
    "there are too few of them to fill a batch: replay has a floor.",
    "weighting": "Replay scores count \u03ba times: a dial between learning and keeping, "
    "which the paper leaves at one.",
    "budgets": "Lines lead from an arm at the common budget to the same arm trained longer or "
    "shorter; the numbers are budgets, in the common one.",
    "transfer": "Arms on the curriculum that a smaller model recorded, or with its reference"
    " losses, beside RoD's own.{replicates}{paper}",
    "seeds": "Every seed, their range and their mean.",
}


def caption(name: str, results: Results) -> str:
    """Returns a figure's caption for these results."""
    base = results["arms"].get("base")
    where = ""
    if base and base["adapt_loss"] is not None:
        where = (
            f" The base model ({base['adapt_loss']:.3f} nats, no forgetting) is off the picture."
        )
    others = " Faint marks and lines are the other seeds." if results["replicates"] else ""
    is_papers = bool(paper_arms(results["recipe"]))
    without = results["profile"].get("rod", {}).get("without") or "the most influential source"
    return _CAPTIONS[name.removeprefix("settings_")].format(
        base=where,
        replicates=others,
        paper=" Crosses are the paper's own numbers." if is_papers else "",
        marks=" Crosses are what the paper says." if is_papers else "",
        without=without if not name.startswith("settings_") else "the source",
    )
