"""The documents: links lead somewhere, commands exist, every metric and key has its row."""

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import config_page
import numpy as np
import pytest
from command_line import composed, nemo_rod
from places import ROOT

from nemo_rod import cli
from nemo_rod.alternatives.odm import ODM
from nemo_rod.commands.mistakes import OPEN, known_keys, understood
from nemo_rod.config import Config
from nemo_rod.run.beforehand import lacking
from nemo_rod.run.processes.pythons import sees_gpu
from nemo_rod.run.stages import Stages
from nemo_rod.selection import Joint, Pool, SourceRow, choose, selection_metrics
from nemo_rod.selection.mix import Mix
from tests import lanes

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Links


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub names the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def targets(page: Path, text: str | None = None) -> list[tuple[str, Path, str]]:
    """(as written, file, anchor) of each link of a page, or of its text, to a file here."""
    links = [link for link in LINK.findall(text or prose(page)) if "://" not in link]
    parts = [(link, *link.partition("#")[::2]) for link in links]
    return [(link, (page.parent / path if path else page), anchor) for link, path, anchor in parts]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    wrong = [
        link
        for link, file, anchor in targets(page)
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert not wrong, f"{name(page)} links to what is not there: {wrong}"


def test_readme_leads_to_the_index_and_the_index_to_every_page():
    index = ROOT / "docs" / "index.md"
    assert index in {file.resolve() for _, file, _ in targets(ROOT / "README.md")}
    assert {*DOCS} - {file.resolve() for _, file, _ in targets(index)} <= {index}


def test_messages_and_comments_name_pages_that_exist():
    texts = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("nemo_rod", "hydra_configs", "recipes", "docker", "benchmarks", "requirements"):
        texts += [file for file in (ROOT / folder).rglob("*") if file.is_file()]
    mention = re.compile(r"(?<!runs/)\bdocs/([\w/-]+\.md)(?:#([\w-]+))?")
    named = [
        (name(file), page, anchor)
        for file in texts
        if file.suffix not in {".pyc", ".svg"}
        for page, anchor in mention.findall(file.read_text())
    ]
    assert len(named) > 10
    known = {name(page).removeprefix("docs/"): page for page in DOCS}
    wrong = [
        (file, page, anchor)
        for file, page, anchor in named
        if page not in known or (anchor and anchor not in anchors(known[page]))
    ]
    assert not wrong


# Commands


def calls(program: str) -> dict[tuple[str, str], list[str]]:
    """Arguments of each call of a program in the documents, by (document, call)."""
    around = r"(?:\$ )?(?:(?:docker|podman|srun) .* |torchrun .* --no-python +)?(?:\w+=\S+ )*"
    pattern = rf"{around}(?:\S*/)?{program} +([a-z-].*)"
    calls = {}
    for page in PAGES:
        blocks = "\n".join(BLOCK.findall(page.read_text())).replace("\\\n", " ")
        inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
        for line in [*blocks.splitlines(), *inline]:
            if call := re.fullmatch(pattern, line.strip()):
                calls[name(page), call[0]] = shlex.split(call[1], comments=True)
    assert calls, f"no document shows a call of {program}"
    return calls


def test_make_targets_exist():
    known = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known |= {lane.target for lane in lanes.LANES}
    assert [call for call, (first, *_) in calls("make").items() if first not in known] == []


@pytest.mark.slow
def test_the_gpu_lanes_collect_their_own_files_alone(tmp_path):
    """An image for GPUs may lack Hypothesis, and collecting other tests would end in errors."""
    tests = {file: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    files: list[str] = []
    for gpu in (lane for lane in lanes.LANES if lane.name in ("gpu", "gpus")):
        marked = [file for file, text in tests.items() if f"mark.{gpu.name}\n" in text]
        assert {ROOT / file for file in gpu.only} >= {*marked} and marked
        files += gpu.only
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError('hypothesis')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    plain = ["-p", "no:hypothesispytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    command = [sys.executable, "-m", "pytest", *plain, "-m", "gpu or gpus", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "error" not in done.stdout, done.stdout


def test_subcommands_exist():
    known = {"--help", *re.findall(r"nemo-rod +([a-z]+)", nemo_rod("help", "all").stdout)}
    used = calls("nemo-rod").items()
    wrong = [call for call, (first, *_) in used if not {*first.split("|")} <= known]
    assert wrong == []


FILLED_IN = {"recipe": "toy_synthetic", "arm": "rod", "arms": "[rod]", "step": "1"}


@cache
def said() -> set[str]:
    """Texts of the package that are no docstrings, with NAME for every value filled in."""
    found = set()
    for file in (ROOT / "nemo_rod").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        whole = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        pieces = {id(piece) for node in whole for piece in node.values}
        pieces |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                values = (v.value if isinstance(v, ast.Constant) else "NAME" for v in node.values)
                found.add("".join(map(str, values)))
            elif isinstance(node, ast.Constant) and id(node) not in pieces:
                found.add(str(node.value))
    return found


def test_cures_that_are_commands_are_understood():
    """Of messages: every command in backquotes, and every key of a section of the configuration."""
    known = {*known_keys(), "cluster.num_nodes"}  # the latter: of NeMo-RL
    sections = {field.name for field in dataclasses.fields(Config)}
    wrong, seen = [], 0
    for text in said():
        for line in re.findall(r"`nemo-rod ([^`]+)`", text):
            words = shlex.split(re.sub(r"\s*\(.*", "", line).replace("=...", "=NAME"))
            command, seen = words[0], seen + 1
            if command in ("NAME", "help", "|".join(words)) or "|" in command:
                continue
            words = [
                f"{key}={FILLED_IN.get(key, value)}" if equals else key
                for key, equals, value in (word.partition("=") for word in words)
            ]
            try:
                if cli.takes_paths(command, words[1:]):
                    cli.path_parser(command).parse_args(words)
                else:
                    assert command in cli.recipe_commands(), command
                    understood(command, ["recipe=toy_synthetic", *words[1:]])
            except (ValueError, AssertionError) as error:
                wrong.append((line, str(error)))
        for key in re.findall(r"(?<![\w./{-])([a-z]\w*(?:\.[a-z_]\w*)+)=", text):
            is_open = any(f"{key}.".startswith(f"{name}.") for name in OPEN)
            if key.partition(".")[0] in sections and not is_open and key not in known:
                wrong.append((key, text[:80]))
    assert seen > 10 and not wrong, wrong


def test_arguments_of_path_commands_are_understood():
    mentions = {"export", "verify", "diff", "materialise", "export|verify|diff", "..."}
    used = [
        words
        for words in calls("nemo-rod").values()
        if cli.takes_paths(words[0], words[1:]) and not {*words[1:]} <= mentions
    ]
    assert {words[0] for words in used} >= {"inspect", "curriculum", "merge"}
    for words in used:
        options = cli.path_parser().parse_args([word for word in words if word != "..."])
        paths = [value for value in vars(options).values() if isinstance(value, Path)]
        assert not [path for path in paths if "=" in str(path)], words


def whole_recipes() -> dict[str, list[str]]:
    """Overrides of each call that names a recipe, and leaves no NAME for the reader to fill in."""
    return {
        f"{page}: {call}": words[1:]
        for (page, call), words in calls("nemo-rod").items()
        if any(re.fullmatch(r"recipe=[a-z]\w*", word) for word in words) and "..." not in call
        if not cli.takes_paths(words[0], words[1:])
    }


@pytest.fixture(scope="module")
def my(tmp_path_factory):
    """The reader's own folder `my`, with the files that the documents tell to put there."""
    folder = tmp_path_factory.mktemp("reader") / "my"
    assert nemo_rod("init", "my", cwd=folder.parent).returncode == 0
    blocks = BLOCK.findall((ROOT / "docs" / "running.md").read_text())
    own = next(block for block in blocks if block.startswith("# @package"))
    (folder / "recipe" / "next.yaml").write_text(own)
    for text in (folder / "text", folder / "second"):
        text.mkdir(exist_ok=True)
        (text / "a.txt").write_text("some text of mine")
    return folder


@pytest.mark.parametrize("call", whole_recipes())
def test_recipes_compose(call, my, monkeypatch):
    """And their stages lack nothing but what this machine or an earlier command has to bring."""
    words = [word for word in whole_recipes()[call] if word not in ("--cfg", "job")]
    overrides = [word for word in words if word not in ("-m", "--config-dir", "my")]
    if "-m" in words:  # the first job of a sweep
        overrides = [word if "[" in word else word.split(",")[0] for word in overrides]
    if "--config-dir" in words:
        overrides.append(f"hydra.searchpath=[file://{my}]")
    config = composed(*overrides)
    monkeypatch.chdir(my.parent)
    lacks = [why for why, everywhere in lacking(Stages(config).all(), config) if everywhere]
    assert [why for why in lacks if not re.search(r"=runs/\S+ does not exist|YOUR_", why)] == []


def test_a_second_domain_makes_replay_of_the_first(my):
    folder = f"hydra.searchpath=[file://{my}]"
    first, second = (composed(f"recipe={name}", folder) for name in ("mine", "next"))
    specs = {spec.name: spec for spec in second.domain.specs}
    (mine,) = (spec for spec in first.domain.specs if spec.role == "adaptation")
    assert specs[mine.name] == dataclasses.replace(mine, role="replay")
    assert [name for name, spec in specs.items() if spec.role == "adaptation"] == ["second"]
    assert second.model.hf == "runs/mine/arms/rod/hf" and second.run_dir == "runs/next"


def test_commands_of_the_readme_run(tmp_path):
    """One after the other, as a reader types them; those of other programs have their own tests."""
    blocks = "\n".join(BLOCK.findall((ROOT / "README.md").read_text()))
    commands = re.findall(r"^nemo-rod (.*?)(?: *#.*)?$", blocks, re.MULTILINE)
    assert [words.split()[0] for words in commands] == [
        *("run", "inspect", "init", "plan", "run", "run")
    ]
    elsewhere = {"inspect ": "runs/toy holds no launch", "run --config-dir my": "torch sees no GPU"}
    (tmp_path / "my" / "text").mkdir(parents=True)
    (tmp_path / "my" / "text" / "a.txt").write_text("some text of mine")
    cluster = tmp_path / "my" / "cluster" / "ours.yaml"
    for words in commands:
        dry = ["dry_run=true"] if words.startswith("run ") else []
        done = nemo_rod(*shlex.split(words), *dry, cwd=tmp_path)
        if "cluster=ours" in words and "YOUR_" in cluster.read_text():
            assert "cluster.account is still 'YOUR_ACCOUNT': set it to your own" in done.stderr
            cluster.write_text(
                re.sub("YOUR_ACCOUNT|YOUR_PARTITION|YOUR_IMAGE", "x", cluster.read_text())
            )
            done = nemo_rod(*shlex.split(words), *dry, cwd=tmp_path)
        lacks = [why for start, why in elsewhere.items() if words.startswith(start)]
        if lacks and "cluster=ours" not in words and not sees_gpu():
            assert done.returncode == 2 and lacks[0] in done.stderr
        else:
            assert done.returncode == 0, (words, done.stderr)


# What is made from the code, and what is quoted from it


def test_every_key_of_the_configuration_page_has_a_meaning():
    text = config_page.page()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if "|" in line]
    keys = {row[0].strip(): row[-1].strip() for row in rows if len(row) == 5 and "`" in row[0]}
    assert len(keys) > 100 and "`selection.multiplier`" in keys
    assert [key for key, meaning in keys.items() if not meaning] == []
    for link, file, anchor in targets(config_page.PAGE, text):
        assert file == config_page.PAGE or anchor in anchors(file.resolve()), link


def test_every_step_of_the_method_has_its_function():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"\| `([\w.]+)`.* in \[([\w/.]+)\]\(([\w/.]+)\) \|$", text, re.MULTILINE)
    assert len(rows) == 8
    for name, shown, path in rows:
        assert path == f"nemo_rod/{shown}"
        body = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            (function,) = (n for n in body if getattr(n, "name", None) == part)
            body = function.body  # type: ignore[attr-defined]


def test_tables_are_made_from_raw_numbers(tmp_path):
    """A number that is typed is found; a table without raw numbers says that it has none."""
    program = ROOT / "benchmarks" / "_tables.py"
    pages = [ROOT / "README.md", *(ROOT / "docs" / "research").glob("*.md")]

    def check(root: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, root / "benchmarks" / "_tables.py", "--check"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = check(ROOT)
    assert (done.returncode, done.stdout) == (0, "every table is that of its raw numbers\n")
    for page in pages:
        if page.name == "laws.md":  # all of its tables are in the next test
            continue
        above = r"(?:<!-- ([^\n]*) -->\n\n)?"
        for mark, table in re.findall(rf"{above}((?:^\|.*\n)+)", page.read_text(), re.MULTILINE):
            is_measured = re.search(r"\| [*+-]*\d+\.\d", "".join(table.splitlines()[2:]))
            known = ("made by make docs", "no raw numbers were kept: to be measured again")
            assert not is_measured or mark.endswith(known), f"{name(page)}: {table[:200]}"
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(program, tmp_path / "benchmarks")
    typed = "controls.md", "laws.md (1.577, explained and not there)", "laws.md (1.579)"
    for file, right, wrong in (("controls", "1.748 (", "1.738 ("), ("laws", "1.577", "1.579")):
        page = tmp_path / "docs" / "research" / f"{file}.md"
        page.write_text(page.read_text().replace(f" {right}", f" {wrong}", 1))
    done = check(tmp_path)
    named = " ".join(f"docs/research/{number}" for number in typed)
    assert (done.returncode, done.stdout) == (1, f"changed: {named}\n")


def test_tables_of_german_laws_are_those_of_their_raw_numbers():
    page = (ROOT / "docs" / "research" / "laws.md").read_text().splitlines()
    made = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "_laws_table.py"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line for line in made.stdout.splitlines() if line.startswith("|")]
    heads = [page[n - 1 : n + 1] for n, line in enumerate(page) if line.startswith("|---")]
    assert [line for line in page if line.startswith("|")] == [
        *heads[0], *rows[:11], *heads[1], *rows[11:18], *heads[2], *rows[18:26], *heads[3],
        *rows[26:],
    ]  # fmt: skip


OF_CALLERS = {  # of the update, the trainer and the journal
    *("train/loss", "train/grad_norm", "train/lr", "memory/peak_gib", "rod/overhead"),
    *("throughput/tokens_per_second", "throughput/model_tflops_per_gpu"),
    *(f"timing/train/{part}" for part in ("scoring", "update", "lookup", "selection", "total")),
    *("validation/<role>/<source>/loss", "validation/forgetting", "validation/adaptation_loss"),
}


def documented() -> set[str]:
    """Names in the first column of the table; a word without a slash replaces the name's end."""
    text = (ROOT / "docs" / "watching.md").read_text()
    names: set[str] = set()
    for line in re.findall(r"^\| (`.*?) \|", text.split("## Loggers")[0], re.MULTILINE):
        first, *others = re.findall(r"`(.*?)`", line)
        names.add(first)
        for word in others:
            end = r"_p10$" if word.startswith("_") else r"[^/]+$"
            names.add(word if "/" in word else re.sub(end, word, first))
    return names


def test_the_page_has_every_metric_of_a_step():
    pool = Pool(0, np.arange(4), np.array([False, False, True, True]))
    loss = np.ones(4, dtype=np.float32)
    choice = choose(pool, Joint(), 2, loss, 0 * loss)
    row = selection_metrics(choice, np.array([0, 0, 1, 1]), ["SOURCE", "OTHER"])
    sources = [SourceRow("<source>", "adaptation", 0, 2), SourceRow("OTHER", "replay", 2, 2)]
    mixed = replace(pool, sources=sources, source_C=np.array([0, 0, 1, 1]))
    mixed_choice = replace(choice, pool=mixed)
    logged = {*Mix(target=1.0).metrics(mixed_choice)}
    for name in [*row, *ODM().metrics(mixed_choice)]:
        if "OTHER" not in name:
            name = re.sub(r"(rod/(?:loss|reference))_.*", r"\1_<group>", name)
            name = re.sub(r"rho_(adaptation|replay)_", "rho_<role>_", name)
            logged.add(name.replace("SOURCE", "<source>"))
    assert documented() == logged | OF_CALLERS
