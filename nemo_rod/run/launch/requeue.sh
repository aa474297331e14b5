# shellcheck shell=bash disable=SC2154
# How a job goes back into the queue: part of stage.sh and of ray.sbatch, which say before it how
# often it may (`max_requeues`), where the stage's `record` is, and its last line at the job's start
# (`last_before`).
#
# A stage that is asked to stop saves, and ends with status 75. Then the job must go back into the
# queue, and nobody else sees to that: a batch script that returns while its job is being preempted,
# or shortly before its time limit, ends the job for good, COMPLETED or FAILED. So this one asks for
# the requeue itself and stays until Slurm ends it.

# Whether a stage that ended with status $1 was asked to stop: by its own word, or because a signal
# came before it could give one. srun returns the highest status of all nodes, and on a node that
# was slow to leave that is the one of a kill; the record of the stage knows better.
told_to_stop() {
  local last
  last=$(tail -n 1 "$record" 2>/dev/null)
  [[ $1 == 75 || $1 == $((128 + 10)) || $1 == $((128 + 15)) ]] || # EX_TEMPFAIL, USR1, TERM
    [[ $last != "$last_before" && $last == *'"event": "stopped"'* ]]
}

requeue() {
  if ((${SLURM_RESTART_COUNT:-0} >= max_requeues)); then
    echo "job script: stopped for good after launcher.requeues=$max_requeues requeues"
    return
  fi
  echo "job script: going back into the queue (requeue $((${SLURM_RESTART_COUNT:-0} + 1)))"
  scontrol requeue "$SLURM_JOB_ID" && sleep 3600
  sleep 300 # refused; where Slurm itself is about to requeue a preempted job, it must find it alive
}
