"""The lines that make the job select."""

import nemo_rod

nemo_rod.install(
    "megatron_lm",
    roles={0: "adaptation", 1: "replay"},
    references=["references/new", "references/old"],
)
