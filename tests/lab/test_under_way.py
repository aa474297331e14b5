"""The page of a run under way: finished and missing parts, with and without evaluated arms."""

import json
from pathlib import Path

import pytest
from test_build import write_run

from nemo_rod.lab.metrics import metrics_of
from nemo_rod.lab.report import build_report
from nemo_rod.lab.report.figures.drawing import whole
from nemo_rod.lab.report.figures.training import curves_of
from nemo_rod.lab.report.style import arm_colour
from nemo_rod.lab.report.under_way import Part, has_begun, parts_of

pytestmark = pytest.mark.usefixtures("no_pictures")


def write_partial(folder: Path, steps: int, total: int) -> None:
    """An arm in training, with a torn last line."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"config": {"train": {"steps": total}}}))
    start = {"validation/replay/web/loss": 3.0, "validation/adaptation/news/loss": 4.0}
    (folder / "validation_start.json").write_text(json.dumps(start))
    rows = []
    for step in range(steps):
        row = {"step": step, "train/loss": 5.0 - step / 10, "rod/replay_share": 0.25}
        if step % 2:
            row |= {"validation/replay/web/loss": 2.5, "validation/adaptation/news/loss": 3.5}
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 9')


@pytest.fixture
def begun(tmp_path):
    """Without an evaluated arm: blocks, base and specialist are done, RoD is at step 4 of 10."""
    run = write_run(tmp_path / "runs" / "small", arms=("no_replay",))
    arms = run.folder / "arms"
    (arms / "no_replay" / "evaluation.json").unlink()
    (run.folder / "base").mkdir()
    write_partial(arms / "rod.partial", 4, 10)
    return run


def test_parts_are_there_in_progress_or_missing(begun):
    parts = parts_of(begun.folder, ["base", "no_replay", "fixed_32", "rod"])
    assert {part.label: part.state for part in parts} == {
        "blocks": "done", "base": "trained", "no replay": "trained", "fixed 32 %": "to do",
        "RoD": "running",
    }  # fmt: skip
    rod = parts[-1]
    assert (rod.done, rod.steps) == (4, 10)
    assert rod.last == "loss 4.7  replay 0.25"
    log = begun.folder / "launch" / "stages" / "rod.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"time": 1, "event": "failed", "why": "no memory"}\n')
    assert parts_of(begun.folder)[-1].state == "failed"  # as `nemo-rod status` says
    states = {part.name: part.state for part in parts_of(begun.folder, ["base", "rod"])}
    assert (states["base"], states["no_replay"]) == ("trained", "done")  # it serves other arms only
    nowhere = begun.folder / "nowhere"
    assert not has_begun(nowhere)
    with pytest.raises(ValueError, match=r"no <arm>/evaluation.json"):
        build_report(nowhere)


def test_a_page_before_any_evaluation_says_what_is_missing(begun):
    assert build_report(begun.folder, arms=["base", "no_replay", "fixed_32", "rod"]) is None
    report = begun.folder / "report"
    page = (report / "index.html").read_text()
    assert "Not done yet: base, no replay, fixed 32 %, RoD." in page
    assert '<progress max="10" value="4">' in page and "4 of 10" in page
    assert page.count('class="picture"') == 5
    assert '<section id="provenance">' in page
    assert not (report / "results.json").exists()


def test_a_page_with_some_arms_evaluated_shows_them_and_the_rest(tmp_path):
    run = write_run(tmp_path / "small", arms=("base", "no_replay"))
    write_partial(run.folder / "arms" / "rod.partial", 2, 10)
    launch = run.folder / "launch" / "1" / "config.yaml"
    launch.parent.mkdir(parents=True)
    cluster = "cluster: {gpu: B200, nodes: 2, gpus_per_node: 4}"
    launch.write_text(f"{cluster}\nreport: {{gpu_hour_price: 3.0}}\n")
    results = build_report(run.folder, arms=["base", "no_replay", "rod"])
    assert results is not None and list(results["arms"]) == ["base", "no_replay"]
    known = results["provenance"]
    assert known["gpu_hours"] == 8 * known["hours"] and known["cost"] == 3 * known["gpu_hours"]
    page = (run.folder / "report" / "index.html").read_text()
    assert "GPU-hours at a cost of 0." in page and '<section id="table-sources">' in page
    assert "Not done yet: RoD." in page and "<h2>All arms</h2>" in page
    (run.folder / "arms" / "rod.partial").rename(tmp_path / "elsewhere")
    build_report(run.folder, arms=["base", "no_replay"])
    assert "Not done yet" not in (run.folder / "report" / "index.html").read_text()


def test_curves_begin_before_the_first_step(begun):
    parts = parts_of(begun.folder)
    charts = {name: picture.figure for name, picture in curves_of(parts).items()}
    points = {
        name: [(row["steps done"], row["value"]) for row in spec["data"]["values"]]
        for name, spec in charts.items()
    }
    assert points["curve-held_out_replay"] == [(0, 3), (2, 2.5), (4, 2.5)]
    assert points["curve-share"] == [(1, 25), (2, 25), (3, 25), (4, 25)]
    assert points["curve-loss"] == [(1, 5), (2, 4.9), (3, 4.8), (4, 4.7)]
    assert [row["source"] for row in charts["curve-sources"]["data"]["values"]] == [
        *3 * ["news (adaptation)"], *3 * ["web (replay)"],
    ]  # fmt: skip
    assert "curve-base" not in charts
    assert curves_of([part for part in parts if part.label == "base"]) == {}


def test_a_mean_over_sources_is_of_all_of_them_and_a_metric_has_its_own_chart():
    """Where a source diverges, the mean of the others would look like an improvement."""
    names = [f"validation/replay/{source}/loss" for source in "ab"]
    rows = [{"step": step, "rod/rho_replay": 1.0, "rho/replay": 7.0} for step in range(4)]
    rows = [row | dict(zip(names, (2.0, 8.0), strict=True)) for row in rows]
    rows[1][names[1]] = float("nan")
    del rows[2][names[1]]
    rows = [row | {"my/a.b": 1.0, "my/a_b": 2.0} for row in rows]
    charts = curves_of([Part("rod", "RoD", metrics=metrics_of(rows), start={names[0]: 2.0})])

    def values(name: str) -> list[tuple[int, float]]:
        figure = charts[name].figure
        assert isinstance(figure, dict)
        return [(row["steps done"], row["value"]) for row in figure["data"]["values"]]

    assert values("curve-held_out_replay") == [(1, 5), (4, 5)]
    titled = {picture.title: values(name)[0][1] for name, picture in charts.items()}
    assert titled["Mean score, replay"] == 1 and titled["rho/replay"] == 7
    assert (titled["my/a.b"], titled["my/a_b"]) == (1, 2)


def test_curves_are_bounded_and_have_the_colours_of_the_frontier(tmp_path):
    """The base is apart; Vega draws all of it."""
    import vl_convert

    names = ("base", "no_replay", "fixed_10", "fixed_32", "rod")
    rows = [
        {"step": step, "train/loss": 3.0, "train/lr": 1.0}
        | {f"rod/rho_{role}": 0.5 for role in ("adaptation", "replay")}
        | {"validation/adaptation/news/loss": 2.0}
        for step in range(500)
    ]  # fmt: skip
    parts = [Part(name, name, "done", metrics=metrics_of(rows), start=rows[0]) for name in names]
    charts = {name: picture.figure for name, picture in curves_of(parts, names).items()}
    held_out = charts["curve-held_out_adaptation"]["data"]["values"]
    assert len([row for row in held_out if row["arm"] == "rod"]) == 241  # bounded
    assert len(charts["curve-loss"]["data"]["values"]) == 4 * 240  # bounded
    assert {row["arm"] for row in charts["curve-base"]["data"]["values"]} == {"base"}
    scale = charts["curve-loss"]["encoding"]["color"]["scale"]
    assert scale["domain"] == list(names[1:])
    assert scale["range"] == [arm_colour(name, names) for name in names[1:]]
    assert {"curve-rho_adaptation", "curve-rho_replay"} <= {*charts}
    for spec in charts.values():
        assert "<path" in vl_convert.vegalite_to_svg(whole(spec))
