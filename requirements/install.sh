#!/usr/bin/env bash
# Builds an environment without a GPU from the pinned sets beside this file:
#
#     install.sh VENV [more requirement files]
#
# PYTHON  an interpreter of 3.11, 3.12 or 3.13; by default a 3.12, which the newest Megatron-Bridge
#         asks for, wherever one is found (pyenv's too), and else the first of the others
# SET     bridge-0.6, bridge-0.5, bridge-0.4 (Python 3.12) or bridge-0.3; by default the newest that
#         the interpreter can have; bridge-0.6 also takes a 3.13, which its metadata exclude
#
# HASHES  files (default): pip takes only files with the digests in hashed/, but any build of torch;
#         all: of torch, too, that is PyPI's builds; no: whatever the index has, such as its own builds
# TORCH_INDEX_URL  an index of builds of torch that need no further package, such as PyTorch's of CPU
#         builds; torch comes from there, and nothing else does
#
# An environment that is there keeps its interpreter.
set -euo pipefail

venv=$1
shift
here=$(cd "$(dirname "$0")" && pwd)

# A pyenv's `python3.12` may be there and still not run.
works() { "$1" -c "import sys; sys.exit(sys.version_info[:2] != ($2))" 2>/dev/null; }

find_python() {
  local minor candidate
  local minors="12 11 13"
  [[ ${SET:-} != bridge-0.3 ]] || minors="11 13"
  for minor in $minors; do
    for candidate in "python3.$minor" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python; do
      if works "$candidate" "3, $minor"; then
        echo "$candidate"
        return
      fi
    done
  done
  echo "No Python 3.11, 3.12 or 3.13 was found: install one, or name it: make PYTHON=/path/to/python3.12 venv" >&2
  return 1
}

if [[ -x $venv/bin/python ]]; then
  python=$venv/bin/python
else
  python=${PYTHON:-$(find_python)}
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || {
  echo "$python does not run: give PYTHON=<an interpreter of Python 3.11, 3.12 or 3.13>" >&2
  exit 1
}
case $version in
  3.12) pins=${SET:-bridge-0.6} ;;
  3.11 | 3.13) pins=${SET:-bridge-0.3} ;;
  *)
    echo "$python is Python $version, and nemo_rod needs 3.11, 3.12 or 3.13: make PYTHON=python3.12 venv" >&2
    exit 1
    ;;
esac
if [[ ! -e $here/$pins.txt ]]; then
  echo "SET=$pins: expected one of $(cd "$here" && echo bridge-?.?.txt | sed 's/\.txt//g')." >&2
  exit 1
fi
if [[ $pins != bridge-0.3 && $version != 3.12 && $pins-$version != bridge-0.6-3.13 ]]; then
  echo "SET=$pins needs Python 3.12, and $python is $version: make PYTHON=python3.12 SET=$pins venv" >&2
  exit 1
fi
if [[ $pins == bridge-0.3 ]]; then
  echo "Python $version gets Megatron-Bridge 0.3, which cannot load Qwen3.5 or Nemotron 3; a Python 3.12 gets 0.6, which can, and so does a 3.13 with SET=bridge-0.6."
fi

size="2 GB"
[[ $version == 3.11 ]] || size="7 GB where your index has only the CUDA build of torch"
echo "Installing torch, NVIDIA's trainer and the tools for Python $version ($pins) into $venv ($size, some minutes)"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
hashes=${HASHES:-files}
case $hashes in
  # without dependencies: every one is pinned, and pip takes no extras (typepy[datetime]) for pins
  files | all) checked=("${pip[@]}" --require-hashes --no-deps) folder=$here/hashed ;;
  no) checked=("${pip[@]}") folder=$here ;;
  *)
    echo "HASHES=$hashes: expected files, all or no." >&2
    exit 1
    ;;
esac
more=()
for file; do
  more+=(-r "$folder/${file##*/}")
done
if [[ $hashes == all ]]; then
  "${checked[@]}" -r "$folder/torch.txt"
fi
torch=("${pip[@]}")
[[ -z ${TORCH_INDEX_URL:-} ]] || torch+=(--no-deps --index-url "$TORCH_INDEX_URL")
"${torch[@]}" -r "$here/torch.txt"
"${checked[@]}" -r "$folder/cpu.txt" -r "$folder/$pins.txt" "${more[@]}"
"${checked[@]}" --no-deps --ignore-requires-python -r "$folder/$pins-nodeps.txt"
