
# The last part of container.sh. Before it: `image`, the `options` of `apptainer exec`, and wait.sh.
set -uo pipefail

scratch=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/nemo-rod.${SLURM_JOB_ID:-none}.XXXXXX") || exit
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/tmp" "$scratch/home" && chmod 1777 "$scratch/tmp"
options+=(--bind "$scratch/tmp:/tmp" --bind "$scratch/tmp:/var/tmp" --home "$scratch/home:$HOME")

# Slurm signals every process of the job: those in the container save, and this one tidies up.
trap 'waited=no' USR1 TERM INT
apptainer exec "${options[@]}" "$image" "$@" &
wait_for $!
