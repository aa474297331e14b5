"""`nemo-rod recipes --paper`: the runs and the files behind every figure and table of the paper.

reproduce.yaml is the one list of them; a test holds that every recipe, arm and file in it exists.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rod.parts import did_you_mean


@dataclass(frozen=True)
class Element:
    """A figure, table or algorithm of the paper, and its making."""

    label: str  # the paper's, such as "fig:frontier"
    content: str  # its subject, in a few words
    # recipes in the order of their dependence, each with the overrides that the element needs; the
    # page of the last one shows it, beside the others
    runs: list[str]
    arms: str  # those that a reader compares
    files: list[str]  # results, in the run folder of the last recipe or in this repository
    tasks: bool = False  # whether it needs the benchmarks, hours beyond the held-out losses

    @property
    def recipes(self) -> list[str]:
        """The recipes of the runs, in their order."""
        return [run.split()[0] for run in self.runs]

    def commands(self) -> list[list[str]]:
        """Returns the command lines that make it from nothing, without the program's name."""
        tasks = ["tasks=paper"] if self.tasks else []
        lines = [["run", *f"recipe={run}".split(), *tasks] for run in self.runs]
        *others, last = self.recipes
        if others:
            folders = ",".join(f"runs/{name}" for name in others)
            lines.append(["report", f"recipe={last}", *tasks, f"report.settings=[{folders}]"])
        return lines


def elements() -> dict[str, Element]:
    """Returns the elements by label, in the paper's order."""
    table: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")))
    return {label: Element(label=label, **values) for label, values in table.items()}


def show(label: str | None) -> None:
    """Prints the labels of all elements, or the commands behind one.

    Raises:
        ValueError: there is no such label.
    """
    by_label = elements()
    if label is None:
        width = max(map(len, by_label))
        for element in by_label.values():
            print(f"{element.label:{width}}  {element.content}")
        print("\n`nemo-rod recipes --paper LABEL` shows the commands.")
        return
    if label not in by_label:
        raise ValueError(
            f"'{label}' names no figure, table or algorithm of the paper"
            f"{did_you_mean(label, by_label)}: expected one of {', '.join(by_label)}."
        )
    element = by_label[label]
    print(f"{element.label}: {element.content}\narms: {element.arms}")
    folder = f"runs/{element.recipes[-1]}"
    files = [f"{folder}/{f}" if f.startswith("report/") else f for f in element.files]
    print("files:", *files)
    for words in element.commands():
        print(shlex.join(["nemo-rod", *words]))
