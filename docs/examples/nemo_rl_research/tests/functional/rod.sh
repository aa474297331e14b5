#!/bin/bash
# The toy on two GPUs: a specialist, references, and RoD, which then has chosen at every step.
set -euo pipefail
project=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
out=$project/tests/functional/rod
rm -rf "$out"
mkdir -p "$out"
cd "$project"
uv run nemo-rod run recipe=toy_synthetic launcher=nemo_rl parallel=dp2 'arms=[no_replay,rod]' \
  pretrain.steps=20 train.steps=10 run_dir="$out/run" "$@" 2>&1 | tee "$out/run.log"
uv run nemo-rod curriculum verify "$out/run/arms/rod"
