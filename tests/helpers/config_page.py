"""The page of every configuration key, made from nemo_rod/config.py and hydra_configs/.

`make docs` writes it to runs/docs/configuration.md.
"""

import ast
import io
import tokenize
from dataclasses import MISSING, Field, fields

from places import ROOT

from nemo_rod import config

PAGE = ROOT / "runs" / "docs" / "configuration.md"
CONFIG = ROOT / "nemo_rod" / "config.py"
GROUPS = ("recipe", "model", "domain", "parallel", "cluster", "launcher", "variants", "tasks")
_HEAD = """# Configuration

Every key that a recipe or the command line may set, with its type, its default, the values that it
accepts and its meaning; any other value, NaN and infinity are refused before anything is written.
`null` means: not set. A key without a default must be set by the recipe. `nemo-rod run recipe=NAME
--cfg job` prints the values that a run would have. The keys of a source are in
[data.md](../../docs/data.md#describing-sources), those of a recipe in NeMo-RL's own form in
[nemo-rl.md](../../docs/nemo-rl.md#train).

## Groups

`GROUP=NAME` takes a whole file of values, and `--config-dir my` adds those of your own folder
`my/GROUP/`. Single keys come on top: `parallel=tp2_pp2 train.lr=1e-4`.

| group | names |
|---|---|
"""


def page() -> str:
    """The whole page."""
    tree = ast.parse(CONFIG.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    comments = _comments()
    sections = [_HEAD + "".join(_group(name) for name in GROUPS)]
    sections.append(_section("All of a run", "", classes["Config"], classes, comments))
    for field in _fields(classes["Config"]):
        key, kind = ast.unparse(field.target), _kind(field)
        prefix = f"{key}."
        if key == "variants":
            kind, prefix = "Variant", f"{key}.NAME."
        if kind in classes and key != "pretrain":  # which has the keys of train
            title = f"`{key}`" if key != "train" else "`train`, and `pretrain`"
            sections.append(_section(title, prefix, classes[kind], classes, comments))
    return "\n".join(sections)


def _group(name: str) -> str:
    folder = ROOT / "hydra_configs" / name
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.yaml")]
    # a template is to be copied; recipes/swap_in/ is in forms of its own
    names = {file.as_posix() for file in files if name != "recipe" or len(file.parts) == 1}
    shown = ", ".join(f"`{file}`" for file in sorted(names - {"template"}))
    return f"| `{name}` | {shown} |\n"


def _section(
    title: str,
    prefix: str,
    section: ast.ClassDef,
    classes: dict[str, ast.ClassDef],
    comments: dict[int, str],
) -> str:
    about = (ast.get_docstring(section) or "").replace("\n\n", "\0").replace("\n", " ")
    rows = ["| key | type | default | accepts | meaning |", "|---|---|---|---|---|"]
    known = {field.name: field for field in fields(getattr(config, section.name))}
    for field in _fields(section):
        key, kind = ast.unparse(field.target), _kind(field)
        if kind in classes and kind != "Optimisation":
            continue  # it has a section of its own
        default, meaning = _default(known[key]), comments.get(field.end_lineno or 0, "")
        bound = known[key].metadata.get("bound")
        accepts = f"`{bound.expected}`" if bound else ""
        if kind == "Optimisation":
            meaning = f"{meaning}; see [below](#train-and-pretrain)".lstrip("; ")
        shown = ast.unparse(field.annotation).replace(" | None", " or null")
        rows.append(f"| `{prefix}{key}` | {shown} | {default} | {accepts} | {meaning} |")
    return "\n".join([f"## {title}", "", about.replace("\0", "\n\n"), "", *rows, ""])


def _fields(section: ast.ClassDef) -> list[ast.AnnAssign]:
    return [node for node in section.body if isinstance(node, ast.AnnAssign)]


def _kind(field: ast.AnnAssign) -> str:
    return ast.unparse(field.annotation).removesuffix(" | None")


def _default(field: Field) -> str:
    if field.default_factory is not MISSING:
        return {dict: "`{}`", list: "`[]`"}.get(field.default_factory, "")
    plain = {"???": "", "None": "`null`", "True": "`true`", "False": "`false`"}
    return plain.get(str(field.default), f"`{field.default}`")


def _comments() -> dict[int, str]:
    """The comment at the end of each line."""
    tokens = tokenize.generate_tokens(io.StringIO(CONFIG.read_text()).readline)
    return {
        token.start[0]: token.string.lstrip("# ").replace("|", r"\|")
        for token in tokens
        if token.type == tokenize.COMMENT
    }


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))
