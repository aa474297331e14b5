#!/bin/bash
# Writes the project folder of a pull request to NeMo-RL's research/: make.sh CHECKOUT URL [FOLDER]
# What it holds are this folder, and the checkout's own Python and header of Python files. The pull
# request also names the folder in the checkout's pyproject.toml (workspace members),
# .github/CODEOWNERS and research/README.md, and renews uv.lock by `uv lock`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
template=$1/research/template_project project=${3:-$1/research/replay_on_demand}
if [[ ! -d $template ]]; then
  echo "$template is missing: expected a checkout of NeMo-RL, v0.6.0 or later" >&2
  exit 1
fi
python=$(sed -n 's/^requires-python = "\(.*\)"/\1/p' "$template/pyproject.toml")
mkdir -p "$project"
cp -r "$here"/{pyproject.toml,run_rod.py,tests} "$project"
cp "$here/README.md.in" "$project/README.md"
cp "$template/.python-version" "$project"
sed -i "s|@URL@|$2|; s|^requires-python = .*|requires-python = \"$python\"|" "$project/pyproject.toml" "$project/README.md"
sed -n '/^[^#]/q; p' "$template/template_project/data_utils.py" >"$project/header"
find "$project" -name '*.py' | while read -r file; do
  cat "$project/header" "$file" >"$file.new" && mv "$file.new" "$file"
done
rm "$project/header"
echo "$project"
