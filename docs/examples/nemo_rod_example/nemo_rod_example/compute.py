"""A figure of the report: the compute of every arm, as bars in Vega-Lite."""

from nemo_rod.lab.report.figures import Picture


def compute(shown):
    (_, results), *_others = shown  # the run, and runs of other settings
    rows = [{"arm": n, "steps": arm["compute"]} for n, arm in results["arms"].items()]
    rows = [row for row in rows if row["steps"]]
    spec = {
        "data": {"values": rows},
        "mark": "bar",
        "encoding": {
            "x": {"field": "steps", "type": "quantitative", "title": "compute (plain steps)"},
            "y": {"field": "arm", "type": "nominal", "title": None},
        },
    }
    return Picture(spec, "Compute by arm", "With scoring.", order=90) if rows else None
