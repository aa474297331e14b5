#!/bin/bash
# Submits the jobs of this folder, each after those that it needs: all of them or none.
set -Eeuo pipefail
folder={folder}
cd {cwd} # where the jobs work
# Those of an allocation around this shell would reach the jobs, whose srun refuses or obeys them;
# and sbatch prefers SBATCH_* to the directives of the jobs.
for name in "${!SLURM_@}" "${!SBATCH_@}" "${!SCANCEL_@}"; do
  [[ $name =~ ^(SLURM_CONF.*|SLURM_JWT|S[A-Z]+_CLUSTERS{kept})$ ]] && continue
  [[ $name != SBATCH_* ]] || echo "submit.sh: $name is not used, set the cluster's keys" >&2
  unset "$name"
done
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

