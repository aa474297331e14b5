#!/bin/bash
# Packs what a plain GPU machine lacks, this checkout and run.py into a folder: pack.sh OUT
# Environment: PYTHON (3.12, with pip and the packages that build wheels), ARCHITECTURE (90: H100 and
# H200), TE=0 to leave TransformerEngine out. pip fetches from the index that its configuration names.
set -euo pipefail
out=${1:?usage: pack.sh OUT}
python=${PYTHON:-python3}
architecture=${ARCHITECTURE:-90}
engine=2.20.2
limit=$((60 * 1024 * 1024))
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do
  platforms+=(--platform "manylinux_${glibc}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
wheels=("$python" -m pip --disable-pip-version-check download -q --no-deps)
binary=(--only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}")

rm -rf "$out"
mkdir -p "$out/wheels"
out=$(cd "$out" && pwd)
"${wheels[@]}" "${binary[@]}" -d "$out/wheels" -r "$root/requirements/gpu-kit.txt"
# modelopt imports pulp, and nothing calls the solvers that are most of it
"$python" "$here/leave_out.py" "$out"/wheels/pulp-*.whl pulp/solverdir/
# has no wheel; pure Python
"$python" -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation \
  -w "$out/wheels" antlr4-python3-runtime==4.9.3

if [ "${TE:-1}" = 1 ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # the library, the package that Python imports, and the sources of its PyTorch part, which are
  # compiled on the machine itself (C++ files, no CUDA), against its torch
  "${wheels[@]}" "${binary[@]}" -d "$work" "transformer-engine-cu13==$engine" "transformer-engine==$engine"
  "${wheels[@]}" --no-build-isolation --no-binary=:all: -d "$work" "transformer-engine-torch==$engine"
  for wheel in "$work"/*.whl; do
    "$python" -m zipfile -e "$wheel" "$work/site"
  done
  rm -rf "$work/site/transformer_engine/jax" "$work/site/transformer_engine/wheel_lib/nccl_ep"
  library=$(find "$work/site" -name libtransformer_engine.so)
  "$python" "$here/keep_architecture.py" "$library" "$architecture"
  mkdir "$out/engine"
  tar -C "$work/site" -cf - . | xz -T2 -3 > "$out/engine/site.tar.xz"
  cp "$work"/transformer_engine_torch-*.tar.gz "$out/engine/"
  echo "$architecture" > "$out/engine/architecture"
fi

git -C "$root" ls-files -z -- nemo_rod hydra_configs recipes tests benchmarks docs \
  pyproject.toml Makefile README.md LICENSE |
  tar -C "$root" --null -T - -czf "$out/source.tar.gz"
cp "$here/run.py" "$out/run.py"

total=$(du -sb "$out" | cut -f1)
du -b --max-depth=1 "$out"
echo "$out: $total bytes ($((total / 1048576)) MiB)"
if [ "$total" -ge "$limit" ]; then
  echo "$out has $total bytes, expected less than $limit (60 MiB): leave TransformerEngine out with TE=0" >&2
  exit 1
fi
