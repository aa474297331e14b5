#!/bin/bash
# Submits the jobs of this folder, each after those that it needs: all of them or none.
set -Eeuo pipefail
folder={folder}
cd {cwd} # where the jobs work
# those of an allocation around this shell would reach the jobs, whose srun refuses some
unset "${!SLURM_JOB@}" "${!SLURM_STEP@}" "${!SLURM_TASK@}" "${!SLURM_N@}"
unset "${!SLURM_MEM@}" "${!SLURM_CPU@}" "${!SLURM_GPU@}" "${!SLURM_TRES@}"
mkdir -p {logs}
if [[ -e $folder/jobs.tsv ]]; then
  echo "submit.sh: $folder/jobs.tsv is there, so these jobs were submitted before" >&2
  exit 1
fi
declare -A job=()
cluster=

take_back() {
  trap - ERR
  echo "submit.sh: a job was refused, so the others are taken back" >&2
  ((${#job[@]} == 0)) || scancel ${cluster:+"--clusters=$cluster"} "${job[@]}"
  rm -f "$folder/jobs.tsv"
}
trap take_back ERR

submit() { # NAME [NEEDED...]
  local name=$1 after="" number need
  for need in "${@:2}"; do
    after+=":${job[$need]}"
  done
  number=$({submit_one})
  job[$name]=${number%%;*} # "number;cluster" where there are several clusters
  [[ $number != *";"* ]] || cluster=${number#*;}
  printf '%s\t%s\n' "$name" "$number" >>"$folder/jobs.tsv"
}

