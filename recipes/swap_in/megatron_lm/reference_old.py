"""The lines that make the job write references of the old corpus."""

from nemo_rod.hosts import swap_in

swap_in.reference(
    "megatron_lm",
    role="replay",
    roles={0: "adaptation", 1: "replay"},
    checkpoint="base",
    out="references/old",
)
