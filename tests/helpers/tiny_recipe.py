"""A recipe of seconds: `toy_synthetic` on a few blocks, with a whole RoD arm."""

STEPS, BATCH = 6, 8
ARMS = ("base", "no_replay", "rod")
RECIPE = (
    *("recipe=toy_synthetic", f"arms=[{','.join(ARMS)}]", "parallel=single", "run_dir=run"),
    *("domain.block_size=16", "domain.holdout_fraction=0.1"),
    *(f"domain.sources.chain_{number}.max_bytes=5000" for number in range(2)),
    *(f"~domain.sources.chain_{number}" for number in range(2, 9)),
    *(f"pretrain.{key}" for key in ("steps=4", "batch_size=8", "micro_batch_size=8")),
    *(f"train.{key}" for key in (f"steps={STEPS}", f"batch_size={BATCH}", "micro_batch_size=8")),
)
