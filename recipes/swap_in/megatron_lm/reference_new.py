"""The lines that make the job write references of the new corpus."""

from nemo_rod.hosts import swap_in

swap_in.reference(
    "megatron_lm",
    role="adaptation",
    roles={0: "adaptation", 1: "replay"},
    checkpoint="specialist",
    out="references/new",
)
