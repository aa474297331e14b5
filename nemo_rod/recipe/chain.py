"""The links of a run: its stages, the evaluation and the report, with what each one needs.

A launcher carries out links. Each is one command, so that it can also run alone, elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.recipe import handover
from nemo_rod.recipe.ask_tasks import FILE, ask_arms, check_tasks, has_tasks, not_asked
from nemo_rod.recipe.evaluate import evaluate_arms, not_evaluated
from nemo_rod.recipe.handover import Stage
from nemo_rod.recipe.stages import Stages

MEASURED = ("evaluation.json", FILE)  # what is known of a model, beside what it is


@dataclass(frozen=True)
class Link:
    """One command of a run.

    Attributes:
        name: as users type it in `rebuild=[...]`.
        command: what runs it alone, such as "train arm=rod".
        title: one line for people.
        needs: names of the links whose results it uses.
        runs_model: whether it starts processes that run a model, on GPUs where there are some.
        folder: where its results are.
        is_there: whether its results are there, whatever they were made from.
        is_done: whether they are there, made from what it would be made from now; asked when its
            needs are done. Raises ValueError if they were made from something else.
        run: does it here.
        results: what must give way for it to be done again.
        preview: checks what can be checked beforehand, and says in a line what it would do.
    """

    name: str
    command: str
    title: str
    needs: tuple[str, ...]
    runs_model: bool
    folder: Path
    is_there: Callable[[], bool]
    is_done: Callable[[], bool]
    run: Callable[[], None]
    results: tuple[Path, ...]
    preview: Callable[[], str] | None = None

    def move_aside(self) -> None:
        """Makes room for it to be done again."""
        for path in self.results:
            handover.move_aside(path)


def whole_chain(config: Config) -> list[Link]:
    """All links of a recipe, in an order that they can run in."""
    stages = Stages(config)
    links = [stage_link(stages, stage) for stage in stages.all()]
    return [*links, evaluate_link(config), report_link(config)]


def stage_link(stages: Stages, stage: Stage) -> Link:
    """The link of a stage."""
    # void with the model's weights
    files = (*MEASURED, "tasks.answered.partial.json")
    measured = [stages.results.arm(stage.name) / name for name in files]
    return Link(
        name=stage.name,
        command=stage.command,
        title=stage.title,
        needs=stage.needs,
        runs_model=stage.runs_model,
        folder=stage.folder,
        is_there=lambda: (stage.folder / "manifest.json").exists(),
        is_done=lambda: handover.is_done(stage),
        run=lambda: handover.make(stage),
        results=(stage.folder, stage.partial, *measured),
    )


def evaluate_link(config: Config) -> Link:
    """Held-out losses, and the tasks, of every arm that has none yet."""
    stages = Stages(config)
    wanted = [config.arm] if config.arm else config.arms
    names = ["base", *(name for name in wanted if name != "base")]
    wanted_files = MEASURED if has_tasks(config) else MEASURED[:1]
    files = [stages.results.arm(name) / file for name in names for file in wanted_files]

    def run() -> None:
        if not_asked(stages, names):
            check_tasks(config)  # a wrong name is found before hours of work
        if not_evaluated(stages, names):
            evaluate_arms(stages, names)
        ask_arms(stages, names)

    return Link(
        name="evaluate",
        command="evaluate" + (f" arm={config.arm}" if config.arm else ""),
        title="evaluate every arm" if not config.arm else f"evaluate {config.arm}",
        needs=tuple(names),
        runs_model=True,
        folder=stages.results.path / "arms",
        is_there=lambda: all(file.exists() for file in files),
        is_done=lambda: not (not_evaluated(stages, names) or not_asked(stages, names)),
        run=run,
        results=tuple(files),
        preview=partial(check_tasks, config) if has_tasks(config) else None,
    )


def report_link(config: Config) -> Link:
    """Tables, figures, the page and the verdicts, over all seeds of a sweep."""
    folder = Path(config.run_dir)

    def run() -> None:
        from nemo_rod.report import build_report, format_checks

        runs = [run for run in (folder, *sorted(folder.glob("*seed_*"))) if (run / "arms").is_dir()]
        if not runs:
            raise ValueError(
                f"{folder} holds no arm: run `nemo-rod run recipe={config.recipe}` first."
            )
        results = build_report(
            runs[0],
            recipe=config.recipe,
            replicates=[*runs[1:], *map(Path, config.report.seeds)],
            settings=list(map(Path, config.report.settings)),
            report_dir=folder / "report",
        )
        print(format_checks(results))

    return Link(
        name="report",
        command="report",
        title=f"report, in {folder / 'report' / 'index.html'}",
        needs=("evaluate",),
        runs_model=False,
        folder=folder / "report",
        is_there=lambda: (folder / "report" / "index.html").exists(),
        is_done=lambda: False,  # cheap, and other seeds may have come
        run=run,
        results=(),
    )
