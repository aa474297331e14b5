"""The rules of the house: import arrows, a light import, a whole wheel, pinned versions.

The house works without the rooms beside it, and no file names a path of one machine.
"""

import ast
import configparser
import email
import functools
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import modules_logger
import pytest
from command_line import nemo_rod, with_packages
from places import ROOT
from tiny_recipe import ARMS, RECIPE

from nemo_rod import cli, parts
from nemo_rod.files import read_json

PACKAGE = ROOT / "nemo_rod"

# The house, from the bottom up: a room imports itself and rooms above it in this list.
HOUSE = (
    *("files", "installation", "parts", "progress", "roles", "signals", "trust"),
    *("checkpoints", "upstream"),
    *("bounds", "corpus", "selection", "loggers", "ranks", "terms"),
    *("config", "layout", "jobs", "megatron", "run", "commands", "cli", "__main__"),
)
# They import the house; nothing in it imports them.
NEIGHBOURS = ("alternatives", "cpu", "hosts", "lab")
# The data's rooms know nobody but these.
ALONE = {
    "corpus": {"bounds", "files", "parts", "roles", "trust"},
    "selection": {"bounds", "files", "parts", "progress", "roles"},
}
# of the house, and of the lab; 15,500 and 9,500 are where they should come back to
MOST_LINES = {"house": 19_419, "lab": 13_775}
MOST_LINES_OF_TESTS = 34_116  # 25,000 is where they should come to
PLACE = re.compile(r"nemo_rod(?!\.cli$)(\.\w+)+(:\w+)?")  # jobs start the command line anew
# The public names of nemo_rod/__init__.py are for users; inside, they would hide the arrows.
FACADE = "__init__"
HEAVY = {
    *("torch", "megatron", "nemo", "nemo_rl", "ray", "lm_eval"),
    *("transformers", "datasets", "pyarrow", "vl_convert"),
}


def imports(file: Path, *, on_import: bool = False) -> Iterator[tuple[str, int]]:
    """Full dotted name and line of everything that a module imports, anywhere or at once.

    A string that is a place in nemo_rod counts as an import, as it may become one.
    """
    package = [*file.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and PLACE.fullmatch(str(node.value)):
            yield str(node.value).replace(":", "."), node.lineno


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def target_room(name: str) -> str | None:
    """Room of an imported name, or None if it lies outside nemo_rod."""
    parts = name.split(".")
    if parts[0] != "nemo_rod":
        return None
    known = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    return parts[1] if len(parts) > 1 and parts[1] in known else FACADE


def modules(*rooms: str) -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if not rooms or room(file) in rooms]


def test_import_arrows_run_one_way():
    wrong = []
    for file in modules():
        source = room(file)
        if source not in {*HOUSE, *NEIGHBOURS, FACADE}:
            wrong.append(f"{file.relative_to(ROOT)}: give the new room '{source}' its place")
            continue
        below = {*HOUSE, *NEIGHBOURS}
        if source in ("parts", FACADE, "alternatives"):  # the first two are tables of what is there
            below = {*HOUSE}
        elif source in HOUSE:
            below = ALONE.get(source, {*HOUSE[: HOUSE.index(source)]})
        for name, line in imports(file):
            if target_room(name) not in {None, source, *below}:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {source} may not import {name}")
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_need_each_other():
    """Not on demand, either; the table of parts names what it does not import."""
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in modules()}
    known = re.compile(f"({'|'.join(map(re.escape, sorted(files, reverse=True)))})\\b")
    uses = {name: {match[1] for used, _ in imports(file) if (match := known.match(used))} - {name}
            for name, file in files.items() if name != "nemo_rod.parts"}  # fmt: skip
    TopologicalSorter(uses).prepare()  # refuses a circle


def test_data_needs_no_heavy_library_and_selection_numpy_alone():
    """Adapters of other people's formats import their libraries when they are used."""
    allowed = {*sys.stdlib_module_names, "nemo_rod", "numpy"}
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in modules(*ALONE)
        for name, line in imports(file, on_import="adapters" in file.parts)
        if (top := name.split(".")[0]) in HEAVY
        or (room(file) == "selection" and top not in allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_house_and_the_lab_stay_small():
    house = [file for file in modules() if room(file) not in NEIGHBOURS]
    for name, files in (("house", house), ("lab", modules("lab"))):
        assert sum(file.read_text().count("\n") for file in files) <= MOST_LINES[name], name


def test_the_tests_stay_small():
    files = (ROOT / "tests").rglob("*.py")
    assert sum(file.read_text().count("\n") for file in files) <= MOST_LINES_OF_TESTS


def test_every_part_of_ours_is_there(wheel):
    """Those of the house lie in it; a wheel registers the others, as pyproject.toml has them."""
    beside = {kind: {n: p.value for n, p in parts.beside(kind).items()} for kind in parts.HOUSE}
    for tables, rooms in ((parts.HOUSE, HOUSE), (beside, (*NEIGHBOURS, None))):
        for kind, table in tables.items():
            for place in filter(None, table.values()):
                home, _, attribute = place.partition(":")
                assert target_room(home) in rooms, f"{kind}: {place}"
                if home != "builtins":
                    assert not attribute or attribute in names_of(home), f"{kind}: {place}"
                    path = ROOT.joinpath(*home.split("."))
                    is_module = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
                    assert is_module, f"{kind}: {place}"
    archive = zipfile.ZipFile(wheel)
    (file,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    registered = configparser.ConfigParser(delimiters=["="])
    registered.optionxform = str  # type: ignore[assignment,method-assign]
    registered.read_string(archive.read(file).decode())
    kinds = {name.removeprefix("nemo_rod.") for name in registered} & parts.HOUSE.keys()
    assert {kind: dict(registered[f"nemo_rod.{kind}"]) for kind in kinds} == {
        kind: table for kind, table in beside.items() if table
    }
    sections = (ROOT / "hydra_configs" / "sections.yaml").read_text()
    assert re.findall("^- (.*)$", sections, re.MULTILINE) == [*beside["sections"]]


def test_programs_import_what_is_there():
    """Also those that only slow lanes start, and those that tests hold as text."""
    wrong = []
    for folder in ("benchmarks", "recipes", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
            for part in [tree, *filter(None, map(program, texts))]:
                for node in ast.walk(part):
                    if isinstance(node, ast.ImportFrom) and target_room(node.module or ""):
                        known = names_of(str(node.module))
                        wrong += [
                            f"{file.relative_to(ROOT)}: {node.module} has no {alias.name}"
                            for alias in node.names
                            if alias.name not in known
                        ]
    assert not wrong, "\n".join(wrong)


def program(node: ast.Constant) -> ast.Module | None:
    """The program that a text is, if it imports from nemo_rod."""
    if not isinstance(node.value, str) or "from nemo_rod" not in node.value:
        return None
    try:
        return ast.parse(node.value)
    except SyntaxError:  # prose, or a part of a program
        return None


@functools.cache
def names_of(module: str) -> set[str]:
    """What can be imported from a module of the package; nothing if it is not there."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return set()
    defined = {inner.stem for inner in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and module == "nemo_rod":
            defined.add(str(node.value))  # its names are loaded when they are asked for
    return defined


def test_imports_are_light():
    program = (
        "import sys; from nemo_rod import cli, corpus, selection; from nemo_rod.upstream import "
        f"functions; print(*(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_wheel_carries_code_recipes_and_configs(wheel):
    expected = {file.relative_to(ROOT).as_posix() for file in modules()}
    expected |= {f"nemo_rod/lab/report/{name}" for name in ("page.html", "paper.json")}
    expected |= {"nemo_rod/py.typed", "nemo_rod/__init__.pyi"}
    expected |= {f"nemo_rod/_configs/{name.partition(':')[0]}" for name in parts.SHIPPED}
    for folder, inside in (("recipes", "recipe/"), ("hydra_configs", "")):
        files = [path for path in (ROOT / folder).rglob("*.yaml") if path.is_file()]
        assert files, f"{folder}/ holds no .yaml file"
        expected |= {
            f"nemo_rod/_configs/{inside}{path.relative_to(ROOT / folder).as_posix()}"
            for path in files
        }
    files = zipfile.ZipFile(wheel).namelist()
    assert expected - set(files) == set()
    assert len(files) == len(set(files)), "the wheel carries a file twice"


def test_the_page_on_pypi_has_no_dead_link(wheel):
    archive = zipfile.ZipFile(wheel)
    (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(file))
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and "# nemo_rod" in text
    assert "nemo_rod/py.typed" in archive.namelist()
    assert re.findall(r"\]\((?!https://)", text) == [] and "docs/figures" not in text
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    linked = hook["for_pypi"]((ROOT / "README.md").read_text(), "https://x.org/rod", "v1")
    assert "](https://x.org/rod/raw/v1/docs/figures/tour.svg)" in linked
    assert "](https://x.org/rod/blob/v1/docs/swap-in.md)" in linked
    assert re.findall(r"\]\((?!https://)", linked) == []


@pytest.fixture(scope="module")
def plain(wheel, tmp_path_factory):
    """What `pip install nemo-rod` makes of an empty environment: the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("plain")
    zipfile.ZipFile(wheel).extractall(folder)
    required = ("numpy", "hydra-core", "omegaconf", "antlr4-python3-runtime", "pyyaml", "packaging")
    for name in required:
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "."}:
            if (source := Path(str(distribution.locate_file(top)))).exists():
                (folder / top).symlink_to(source)
    return folder


@pytest.mark.parametrize(
    ("command", "extras"),
    [("run", "data,bridge,report"), ("prepare", "data"), ("report", "report")],
)
def test_plain_wheel_says_in_one_sentence_what_to_install(plain, tmp_path, command, extras):
    done = subprocess.run(
        # without site-packages
        [sys.executable, "-S", "-m", "nemo_rod.cli", command, "recipe=toy", "arms=[merge_0.6]"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(plain)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"pip install 'nemo-rod[{extras}]'" in done.stderr
    assert "images.md" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def kept_files() -> list[Path]:
    """Files that git tracks, or would: all but the ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.>}])/(?:work|root|home/[a-z]\w*)/")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in kept_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)


PINNED = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==(\S+)", re.MULTILINE)
# Licences that oblige a distributor to more than a notice.
COPYLEFT = re.compile(r"\b[AL]?GPL|MPL|EPL|CDDL|Proprietary", re.IGNORECASE)


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(name: str) -> str | None:
    """The licence in the metadata of a package; None if it is not installed."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    classifiers = [c for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    text = metadata.get("License-Expression") or ", ".join(classifiers)
    return text or (metadata.get("License") or "")[:60]


def test_packages_with_obligations_are_named():
    page = (ROOT / "docs" / "support.md").read_text().partition("## Licences\n")[2]
    named = {*re.findall(r"`([a-z-]+)`", page.partition("\n## ")[0])}
    pinned = {
        normal(name)
        for file in PINNED
        if file.stem != "sbom"  # a tool in an environment of its own
        for name, _ in PIN.findall(file.read_text())
    }
    assert named <= pinned
    licences = {name: text for name in pinned if (text := licence(name)) is not None}
    assert len(licences) > 50
    assert {name for name, text in licences.items() if COPYLEFT.search(text)} <= named


@pytest.mark.parametrize("file", PINNED, ids=lambda file: file.stem)
def test_pins_have_digests_of_their_files(file):
    hashed = (file.parent / "hashed" / file.name).read_text()
    entries = re.findall(
        r"^(\S+==\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", hashed, re.MULTILINE
    )
    pinned = [PIN.match(entry) for entry, digests in entries if digests]
    pins = {(normal(name), version) for name, version in PIN.findall(file.read_text())}
    assert {(normal(m[1]), m[2]) for m in pinned if m} == pins
    assert len(pinned) == len(pins), "a pin without digests, or twice"
    # nothing else, such as an index or another file
    assert hashed.count("==") == len(pins)


STAGES = (  # of RoD's arm, each as a command
    *("prepare", "pretrain", "reference arm=base", "train arm=no_replay"),
    *("reference arm=no_replay", "train arm=rod", "evaluate"),
)


def without(room: str, wheel: Path, folder: Path) -> dict[str, str]:
    """The environment of an installation that lacks a room and its entry points."""
    zipfile.ZipFile(wheel).extractall(folder)
    shutil.rmtree(folder / "nemo_rod" / room)
    (points,) = folder.glob("*.dist-info/entry_points.txt")
    lines = points.read_text().splitlines(keepends=True)
    points.write_text("".join(line for line in lines if f"nemo_rod.{room}." not in line))
    modules_logger.install(folder)
    return with_packages(folder)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["lab", "hosts"])
def test_a_recipe_runs_without_a_room(room, wheel, tmp_path):
    environment, cwd = without(room, wheel, tmp_path / "installed"), tmp_path / "cwd"
    cwd.mkdir()
    stages = STAGES if room == "lab" else ("run",)  # with the report
    for stage in stages:
        command, *words = stage.split()
        done = nemo_rod(command, *RECIPE, "logger=[modules]", *words, cwd=cwd, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
    for name in ARMS:
        losses = read_json(cwd / "run" / "arms" / name / "evaluation.json")["loss"]
        assert set(losses) == {"adaptation", "replay"}
    assert (cwd / "run" / "report").exists() == (room != "lab")
    trained = modules_logger.imported(cwd / "run" / "arms" / "rod")
    assert "nemo_rod.megatron.rod_selector" in trained
    assert not [name for name in trained if re.match(r"nemo_rod\.(lab|hosts)\b", name)]


def test_a_package_without_metadata_says_so(monkeypatch):
    monkeypatch.setattr(parts, "all_entry_points", lambda: ({}, {}))
    monkeypatch.setattr("sys.argv", ["nemo-rod", "status", "run"])
    for call in (lambda: parts.load("hosts", "megatron_bridge"), cli._run_command):
        with pytest.raises(ValueError, match=r"one of .*\. nemo_rod is on the path, but"):
            call()


def test_what_is_not_there_is_said(wheel, tmp_path):
    environment = without("lab", wheel, tmp_path)
    for words, sentence in (
        ("status run", "There is no command 'status': expected one of run, prepare, "),
        ("run recipe=toy_synthetic", "makes the arm merge_0.6: take it out of arms=[...], or"),
        ("run recipe=toy_synthetic report.prompts=[]", "There is no key report.prompts: "),
    ):
        done = nemo_rod(*words.split(), cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert sentence in done.stderr
    helped = nemo_rod("help", cwd=tmp_path, env=environment).stdout
    assert "nemo-rod run recipe=NAME" in helped and "nemo-rod status" not in helped
