# shellcheck shell=bash disable=SC2154
# Runs one stage, `command`, on all nodes of this Slurm job. Every job script sources this file,
# after it has said where the stage's `record` is. Before it: `srun_options`, and requeue.sh.
set -uo pipefail

# The time limit is near (--signal=B:USR1@...): srun hands the signal on to every process of the
# step. A TERM would end srun instead.
# shellcheck disable=SC2317,SC2329 # the trap calls it
near_the_limit() {
  echo "stage.sh: the time limit is near, asking the stage to save and stop"
  limit=near
  kill -USR1 "$step" 2>/dev/null && waited=no
}

if ((SLURM_JOB_NUM_NODES > 1)); then
  # Where the nodes meet, and by which network. Their names need not resolve, their addresses do.
  address_of() {
    scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p'
  }
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  NEMO_ROD_HEAD="$(address_of "${hosts[0]}"):$((20000 + SLURM_JOB_ID % 10000))"
  NEMO_ROD_PEER=$(address_of "${hosts[-1]}")
  export NEMO_ROD_HEAD NEMO_ROD_PEER NEMO_ROD_RECORD="$record"
  # only who knows it can give the nodes work
  NEMO_ROD_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  export NEMO_ROD_KEY
fi

echo "stage.sh: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, requeued ${SLURM_RESTART_COUNT:-0} times"
last_before=$(tail -n 1 "$record" 2>/dev/null)
limit=far
trap near_the_limit USR1
srun "${srun_options[@]}" "${command[@]}" &
step=$!
wait_for "$step"
status=$?
if [[ $status != 0 ]] && { told_to_stop "$status" || [[ $limit == near ]]; }; then
  requeue
fi
exit "$status"
