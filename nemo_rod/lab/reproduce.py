"""`nemo-rod paper`: the runs and the files behind every figure and table of the paper.

The table below is the one list of them; a test holds that every recipe, arm and file in it exists.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass

from nemo_rod.commands.arguments import Arguments
from nemo_rod.parts import did_you_mean

_GERMAN_12B, _LEGAL_12B = "german_nemotron_nano_12b_v2", "legal_nemotron_nano_12b_v2"
_GERMAN_9B, _LEGAL_9B, _GERMAN_4B = "german_qwen3_5_9b", "legal_qwen3_5_9b", "german_qwen3_5_4b"
_SMALL = (f"{_GERMAN_4B} arms=[base,no_replay,rod]",)  # transfers start from it
_OTHERS = (_LEGAL_12B, _GERMAN_4B, _GERMAN_9B, _LEGAL_9B)
_GERMAN = (_GERMAN_12B, _GERMAN_4B, _GERMAN_9B)  # the 9B follows the 4B
_MULTIPLIERS = (
    f"{_LEGAL_12B} arms=[base,no_replay,fixed_10,fixed_20,rod,rod_beyond,rod_m1.5,rod_m4,rod_m8]"
)
_LONG = "fixed_17,fixed_32,fixed_65,fixed_17_long,fixed_32_long,max_replay,rod"


@dataclass(frozen=True)
class Element:
    """A figure, table or algorithm of the paper, and its making."""

    label: str  # the paper's, such as "fig:frontier"
    content: str  # its subject, in a few words
    # recipes in the order of their dependence, each with the overrides that the element needs; the
    # page of the last one shows it, beside the others
    runs: tuple[str, ...]
    arms: str  # those that a reader compares
    files: tuple[str, ...]  # results, in the run folder of the last recipe or in this repository
    tasks: bool = False  # whether it needs the benchmarks, hours beyond the held-out losses

    @property
    def recipes(self) -> list[str]:
        """The recipes of the runs, in their order."""
        return [run.split()[0] for run in self.runs]

    def commands(self) -> list[list[str]]:
        """Returns the command lines that make it from nothing, without the program's name."""
        tasks = ["tasks=paper"] if self.tasks else []
        lines = [
            ["run", f"recipe={first}", *more, *tasks] for first, *more in map(str.split, self.runs)
        ]
        *others, last = self.recipes
        if others:
            folders = ",".join(f"runs/{name}" for name in others)
            lines.append(["report", f"recipe={last}", *tasks, f"report.settings=[{folders}]"])
        return lines


def _figures(*names: str) -> tuple[str, ...]:
    return tuple(f"report/figures/{name}.svg" for name in names)


def _tables(*names: str) -> tuple[str, ...]:
    return tuple(f"report/tables/{name}.md" for name in names)


ELEMENTS = (
    Element(
        "fig:method", "the method; scores and share over training",
        (_GERMAN_12B,), "rod", ("docs/figures/tour.svg", *_figures("scores")),
    ),
    Element(
        "fig:frontier", "five settings, F_val and tasks",
        (_LEGAL_12B, _GERMAN_4B, _GERMAN_9B, _LEGAL_9B, _GERMAN_12B),
        "no_replay fixed_32 max_replay merge_0.6 rod", _figures("settings_frontier"), tasks=True,
    ),
    Element("fig:forgetting_profile", "who is protected", (_GERMAN_12B,),
            "no_replay fixed_17 fixed_32 rod", _figures("forgetting_profile")),
    Element("fig:oversampling", "who is replayed", (_GERMAN_12B,), "no_replay fixed_32 rod",
            _figures("sampling_ratio")),
    Element(
        "fig:curriculum", "what is replayed, how much and when",
        (*_SMALL, _GERMAN_9B, _GERMAN_12B), "rod", _figures("settings_replay_share"),
    ),
    Element(
        "fig:ablation-components", "selection at a fixed share, and joint",
        (
            f"{_LEGAL_12B} arms=[base,no_replay,fixed_10,fixed_20,rod,rod_m4,random_random,"
            "random_rho,rho_random,rho_rho,control_share,control_source]",
        ),
        "random_random random_rho rho_random rho_rho control_share control_source rod",
        _figures("components"),
    ),
    *(
        Element(label, content, (_MULTIPLIERS,), "rod_m1.5 rod_beyond rod_m4 rod_m8",
                _figures("pool_size"))
        for label, content in (
            ("fig:ablation-multiplier", "candidate multiplier m"),
            ("fig:ablation-replay-share", "replay share over training, by m"),
        )
    ),
    Element(
        "tab:cross_scale", "references and curricula of smaller models",
        (
            *_SMALL,
            f"{_GERMAN_12B} arms=[base,no_replay,rod,rod_beyond]",
            "german_nemotron_3_nano_30b_a3b",
            "german_qwen3_5_35b_a3b",
            f"{_GERMAN_9B} arms=[base,no_replay,fixed_32,rod,rod_small_reference,rod_transfer]",
        ),
        "no_replay fixed_32 rod_transfer",
        (*_tables("transfer"), *_figures("transfer")), tasks=True,
    ),
    Element("alg:rod", "the algorithm", ("toy",), "rod", ("nemo_rod/selection/selector.py",)),
    Element(
        "tab:capability_evals", "tasks by capability",
        (f"{_GERMAN_12B} arms=[base]",), "base", ("hydra_configs/tasks/paper.yaml",), tasks=True,
    ),
    Element(
        "tab:frontier_full", "every arm in numbers",
        (_GERMAN_12B, _GERMAN_4B, _GERMAN_9B, _LEGAL_9B, _LEGAL_12B),
        "base no_replay fixed_32 merge_0.2 rod", _tables("arms", "paper"), tasks=True,
    ),
    Element(
        "fig:frontier_budget", "fixed replay trained beyond the common budget",
        tuple(f"{name} arms=[base,no_replay,{_LONG}]" for name in _GERMAN),
        "fixed_17 fixed_17_long fixed_32_long max_replay rod", _figures("budgets"),
    ),
    Element(
        "tab:rod_convergence", "RoD beyond its budget",
        (
            f"{_GERMAN_12B} arms=[base,no_replay,fixed_17,rod,rod_beyond]",
            f"{_LEGAL_12B} arms=[base,no_replay,fixed_10,rod,rod_beyond]",
        ),
        "rod rod_beyond", _tables("budgets"),
    ),
    Element(
        "tab:proxy_replay_base_loss", "how well the base knows the replay data",
        tuple(
            f"{name} arms=[base]"
            for name in (_LEGAL_12B, _GERMAN_12B, _LEGAL_9B, _GERMAN_9B, _GERMAN_4B)
        ),
        "base", _tables("base_loss"),
    ),
    Element(
        "fig:qwen_task_forgetting", "change of each capability",
        (*_SMALL, _GERMAN_9B), "no_replay fixed_17 fixed_32 rod",
        (*_figures("capabilities"), *_tables("capabilities")), tasks=True,
    ),
    Element(
        "fig:rho_loss_dynamics", "scores and share, other settings",
        (_GERMAN_4B, _GERMAN_9B, _LEGAL_9B, _LEGAL_12B), "rod",
        _figures("settings_scores", "settings_replay_share"),
    ),
    Element("fig:forgetting_profiles_extended", "profiles, with and without the outlier", _OTHERS,
            "no_replay fixed_20 rod", _figures("settings_forgetting_profile")),
    Element("fig:oversampling_extended", "sampling ratios, other settings", _OTHERS,
            "no_replay rod", _figures("settings_sampling_ratio")),
)  # fmt: skip


def declare(parser: Arguments) -> None:
    """Declares the command's arguments."""
    parser.description = "The runs and files behind a figure or table of the paper."
    parser.add_argument(
        "label", nargs="?", metavar="LABEL", help="such as fig:frontier; all without"
    )
    parser.add_argument("action", nargs="?", metavar="run", help="also carries the commands out")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="for every run: launcher=slurm"
    )
    parser.set_defaults(main=_paper)


def _paper(options: argparse.Namespace) -> None:
    if options.label is None:
        width = max(len(element.label) for element in ELEMENTS)
        for element in ELEMENTS:
            print(f"{element.label:{width}}  {element.content}")
        print("\nnemo-rod paper LABEL shows the commands; nemo-rod paper LABEL run runs them.")
        return
    by_label = {element.label: element for element in ELEMENTS}
    if options.label not in by_label:
        raise ValueError(
            f"'{options.label}' names no figure, table or algorithm of the paper"
            f"{did_you_mean(options.label, by_label)}: expected one of {', '.join(by_label)}."
        )
    if options.action not in (None, "run"):
        raise ValueError(f"'{options.action}' after {options.label}: expected `run`, or nothing.")
    element = by_label[options.label]
    lines = element.commands()
    print(f"{element.label}: {element.content}\narms: {element.arms}")
    folder = f"runs/{element.recipes[-1]}"
    print(
        "files:", " ".join(f"{folder}/{f}" if f.startswith("report/") else f for f in element.files)
    )
    if options.action is None:
        for words in lines:
            print(" ".join(["nemo-rod", *words]))
        return
    submits = any(
        word.startswith("launcher=") and word != "launcher=local" for word in options.overrides
    )
    for words in lines:
        if submits and words[0] == "report":
            print("once the submitted runs have ended:", " ".join(["nemo-rod", *words]))
            continue
        command = [*words, *options.overrides] if words[0] == "run" else words
        print(" ".join(["nemo-rod", *command]), flush=True)
        status = subprocess.run(
            [sys.executable, "-P", "-m", "nemo_rod.cli", *command], check=False
        ).returncode
        if status:
            raise SystemExit(status)
