# shellcheck shell=bash disable=SC2154
# The last part of ray.sbatch: runs `ray_sub`, and requeues the job where stage.sh would.
set +e # from here on, statuses are looked at
set -o pipefail

# The time limit is near (--signal=B:USR1@...). ray.sub hands no signal on to its stage, so nothing
# can be saved: the job goes back into the queue at once, and resumes from its last checkpoint. If
# it may not, the stage has the rest of its time.
# shellcheck disable=SC2317,SC2329 # the trap calls it
near_the_limit() {
  echo "ray.sbatch: the time limit is near"
  waited=no
  if [[ -z $requeuer ]]; then
    requeue &
    requeuer=$!
  fi
}

# A requeued job has the number, and so the folder, of its first attempt. By these files ray.sub
# would take this attempt's Ray for started, or for ended.
rm -f "$BASE_LOG_DIR/$SLURM_JOB_ID-logs"/{STARTED_RAY_HEAD,ENDED}
export SLURM_OPEN_MODE=${SLURM_OPEN_MODE:-append} # nor does srun empty the first attempt's logs

last_before=$(tail -n 1 "$record" 2>/dev/null)
requeuer=
trap near_the_limit USR1
bash "$ray_sub" &
ray=$!
wait_for "$ray"
status=$?
if [[ $status != 0 && -n $requeuer ]]; then
  wait "$requeuer"
elif [[ $status != 0 ]] && told_to_stop "$status"; then
  requeue
fi
exit "$status"
