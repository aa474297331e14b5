"""The command line: its words, its help, what a first hour gets wrong, and lines of progress."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from command_line import RECIPES, composed, here, nemo_rod
from made_up_run import RECIPE as RECIPE_OF_IT

from nemo_rod import __version__, cli, parts
from nemo_rod.commands import recipes
from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.errors import errors_in_one_sentence
from nemo_rod.config import Config
from nemo_rod.installation import config_folder
from nemo_rod.lab import recipe_list
from nemo_rod.progress import PREFIX, Progress
from nemo_rod.run import beforehand, hub
from nemo_rod.run.launch.render import typed_command
from nemo_rod.run.processes import pythons
from nemo_rod.run.stages import Stages
from nemo_rod.signals import Stopped

LAYOUTS = sorted(file.stem for file in (config_folder() / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_serves_the_toy(layout):
    size = (f"{name}.micro_batch_size=2" for name in ("train", "pretrain"))  # for 8 replicas
    assert composed("recipe=toy", f"parallel={layout}", *size).parallel.world_size >= 1


@pytest.mark.parametrize(
    ("line", "is_errors", "status"),
    [
        ("--help", False, 128 + signal.SIGPIPE),
        ("init my", True, 128 + signal.SIGPIPE),
        ("run recipe=toy --cfg job", False, 128 + signal.SIGPIPE),
        ("run recipe=toy --info defaults", False, 0),  # Hydra logs this, and logs go on
    ],
)
def test_a_closed_pipe_ends_a_command_silently(line, is_errors, status, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "nemo_rod.cli", *line.split()]
    outputs = (writer, writer if is_errors else subprocess.PIPE)
    done = subprocess.run(words, stdout=outputs[0], stderr=outputs[1], cwd=tmp_path, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (status, b"")


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ("seed=7", [7]),
        ("seed=1,2 -m", [1, 2]),
        ("seed=1,2 -m train.steps=3 cluster.mounts=[/a:/b] cluster.image=/a%b.sqsh", [1, 2]),
    ],
)
def test_a_sweep_has_a_folder_for_each_job_and_leaves_no_file(words, seeds, tmp_path, monkeypatch):
    ran: list[Config] = []
    monkeypatch.setattr(recipes, "on_all_nodes", lambda _, config: ran.append(config))
    monkeypatch.setattr(sys, "argv", ["nemo-rod"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    recipes.run_recipe("plan", ["recipe=toy_synthetic", *words.split()])
    assert [config.seed for config in ran] == seeds
    assert len({config.run_dir for config in ran}) == len(seeds)
    assert all(re.fullmatch(r"[\w./=-]+", config.run_dir) for config in ran)
    assert not [*tmp_path.iterdir()], "what Hydra leaves of a sweep"


def test_a_working_folder_that_is_gone_is_named(tmp_path):
    words = f"{sys.executable} -m nemo_rod.cli plan recipe=toy"
    line = f"mkdir gone && cd gone && rmdir ../gone && {words}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "The working folder has been removed: " in done.stderr


def test_an_empty_word_is_named(tmp_path):
    done = nemo_rod("run", "recipe=toy", "", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "There is an empty word: leave it out" in done.stderr


def test_dictionaries_need_no_plus_and_null_leaves_out_the_cluster_of_a_recipe(tmp_path):
    words = ("cluster=null", "cluster.env.NAME=x", "domain.sources.web.max_documents=3")
    done = nemo_rod("run", "recipe=german_qwen3_0_6b", *words, "--cfg", "job", cwd=tmp_path)
    for line in ("  gpu: null", "NAME: x", "max_documents: 3"):
        assert line in done.stdout, done.stderr


@pytest.mark.parametrize("verb", sorted({*cli.recipe_commands()} - {"merge", "report"}))
def test_help_of_every_command_on_a_recipe(verb, monkeypatch, capsys):
    for words in ((verb, "--help"), (verb, "recipe=toy", "-h"), ("help", verb)):
        monkeypatch.setattr(sys, "argv", ["nemo-rod", *words])
        with suppress(SystemExit):
            cli.main()
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: nemo-rod {verb} recipe=NAME [KEY=VALUE ...]")
        assert f"  nemo-rod {verb} " in shown and "rebuild=[STAGE,...]" in shown


def test_version():
    assert nemo_rod("--version").stdout == f"nemo-rod {__version__}\n"


def test_recipes_are_listed_with_their_hours(tmp_path, monkeypatch, capsys):
    assert nemo_rod("init", "my", cwd=tmp_path).returncode == 0
    few = nemo_rod("recipes", "--config-dir", "my", cwd=tmp_path)
    assert "mine" in few.stdout and "toy_synthetic" in few.stdout and "toy_sizes" not in few.stdout
    assert "--all" in few.stderr
    listed = nemo_rod("recipes", "--all", "--config-dir", "my", cwd=tmp_path)
    rows = [line for line in listed.stdout.splitlines() if line[0] != " "]
    assert [row.split()[0] for row in rows] == ["recipe", *sorted([*RECIPES, "mine"])]
    assert all(len(row.split()) > 4 for row in rows[1:]) and listed.stderr == "", listed.stdout
    (tmp_path / "my" / "recipe" / "broken.yaml").write_text("a: [")
    names, shipped = ["german_qwen3_5_4b", "toy_synthetic"], tmp_path / "shipped" / "recipe"
    shipped.mkdir(parents=True)
    for name in names:  # a plan of all takes a quarter of a minute
        (shipped / f"{name}.yaml").touch()
    monkeypatch.setattr(recipe_list, "config_folder", lambda: shipped.parent)
    monkeypatch.chdir(tmp_path)
    here("recipes", "--config-dir", "my", "plan=true")
    out, err = capsys.readouterr()
    assert re.findall(r"(?m)^(\w+) .* [\d.]+ (?:s|min|h)\b", out) == sorted([*names, "mine"])
    assert "broken: while parsing a flow" in err and len(err.splitlines()) == 1, err


def test_the_recipe_of_init_can_be_planned_and_run(tmp_path):
    done = nemo_rod("init", "my", cwd=tmp_path)
    commands = [re.findall(r"nemo-rod (.*?)(?:  |$)", line) for line in done.stdout.splitlines()]
    plan, dry_run, run = [call[0].split() for call in commands if call and "recipe=" in call[0]]
    assert (plan[0], dry_run[-1], run[-1]) == ("plan", "dry_run=true", "recipe=mine")
    assert "Plan of mine" in nemo_rod(*plan, cwd=tmp_path).stdout
    assert "train fixed_20: to do" in nemo_rod(*dry_run, cwd=tmp_path).stderr
    (tmp_path / "my" / "recipe" / "mine.yaml").write_text("changed")
    assert "my/recipe/mine.yaml: is there, and stays" in nemo_rod("init", "my", cwd=tmp_path).stdout
    assert (tmp_path / "my" / "recipe" / "mine.yaml").read_text() == "changed"


@pytest.mark.parametrize("name", ['a"b', "a\\b", "${seed}", "a[1]", "a\nb", "a/../*"])
def test_a_folder_that_no_recipe_can_name_is_refused(name, tmp_path):
    done = nemo_rod("init", name, cwd=tmp_path)
    assert (done.returncode, [*tmp_path.iterdir()]) == (2, [])
    assert "cannot be in a recipe: choose a folder" in done.stderr


def test_what_init_prints_can_be_typed_and_any_terminal_can_show_it(tmp_path):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = nemo_rod("init", "my grün", cwd=tmp_path, env=ascii_only)
    assert done.returncode == 0 and r"my gr\xfcn/recipe/mine.yaml: written" in done.stdout
    assert r"nemo-rod run --config-dir 'my gr\xfcn' recipe=mine" in done.stdout
    assert "my grün/text/*.txt" in (tmp_path / "my grün/recipe/mine.yaml").read_text("utf-8")


def test_a_recipe_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(b"\xff")
    done = nemo_rod("run", "--config-dir", tmp_path, "recipe=mine")
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-rod: recipe/mine.yaml is not a configuration (UnicodeDecodeError: 'utf-8' codec "
        "can't decode byte 0xff in position 0: invalid start byte): save it as UTF-8.\n"
    )


@pytest.mark.parametrize("command", cli.recipe_commands())
def test_dry_run_of_every_command_says_something_and_does_nothing(command, tmp_path):
    words = ("arm=rod", "step=10") if command == "export" else ()
    done = nemo_rod(command, "recipe=toy", *words, "dry_run=true", cwd=tmp_path)
    assert done.returncode == (2 if command == "evaluate" else 0), done.stderr  # of what is missing
    assert done.stdout + done.stderr and not [*tmp_path.iterdir()]


def test_a_command_of_another_package_is_not_called_with_dry_run(capsys):
    ran: list[bool] = []

    def foreign(config: Config) -> None:
        """Trains something."""
        ran.append(config.dry_run)

    obedient = recipes.obeying_dry_run("foreign", foreign)
    config = composed("recipe=toy")
    for config.dry_run in (True, False):
        obedient(config)
    assert ran == [False] and capsys.readouterr().err.endswith(
        "has done nothing: Trains something.\n"
    )


@pytest.mark.parametrize(
    ("words", "visible", "devices", "sentence"),
    [
        (["cluster=h100_1"], "0", 0, "cluster.gpu=H100, but torch sees no GPU on this machine"),
        (["cluster=h100_1", "parallel=single"], "0", 1, None),
        (["cluster=h100_1", "parallel=dp2"], "0", 1, "parallel puts 2 processes on this machine"),
        (["parallel=dp2"], "0", 1, "where torch sees 1 GPU: each needs one"),
        (["parallel=dp2"], "0", 0, None),
        (["parallel.context=2"], "0", 0, "parallel.context=2 needs a GPU"),
        (["parallel=single", "parallel.context=2"], "0", 2, None),
        (["cluster=h100_1"], "", 1, "cluster.gpu=H100, but torch sees no GPU"),
        (["cluster=b200_8", "parallel=dp8", "launcher=slurm"], "0", 0, None),
    ],
)
def test_processes_have_the_gpus_that_the_cluster_names(
    words, visible, devices, sentence, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pythons, "sees_gpu", lambda: True)
    monkeypatch.setattr(beforehand, "sees_gpu", lambda: True)
    answer = SimpleNamespace(stdout=f"{devices}\n", returncode=0)
    monkeypatch.setattr(pythons.subprocess, "run", lambda *_, **__: answer)
    size = (f"{name}.micro_batch_size=2" for name in ("train", "pretrain"))
    config = composed("recipe=toy_synthetic", *words, *size)
    lacks = beforehand.lacking(Stages(config).all(), config)
    told = [str(sentence) in lack.sentence for lack in lacks]
    assert told == [True] * (sentence is not None), lacks


EVERY_ARM = ["no_replay", "fixed_32", "rod", "merge_0.6", "references_specialist"]
OTHER_INPUTS = {  # what is changed -> stages that were made with something else, and the first
    "seed=43": (EVERY_ARM, "seed=42"),
    "train.lr=1e-5": (EVERY_ARM, "train.lr=0.001"),
    "selection.kappa=2": (["rod"], "selection.kappa=1.0"),
}


@pytest.mark.parametrize("change", OTHER_INPUTS)
def test_dry_run_and_refusal_name_all_that_differs_at_once(change, made_run):
    names, value = OTHER_INPUTS[change]
    words = (*RECIPE_OF_IT, f"run_dir={made_run}", change)
    dry = nemo_rod("run", *words, "dry_run=true")
    refused = nemo_rod("run", *words)
    assert (dry.returncode, refused.returncode) == (2, 2)
    *lines, last = dry.stderr.splitlines()
    assert refused.stderr == f"{last}\n"
    (rebuild,) = re.findall(r"add (rebuild=\[(.*)\]) to make (?:it|all) again", last)
    assert f"was made with {value}, but now it is" in last
    differ = [line for line in lines if ": differs: " in line]
    assert sorted(rebuild[1].split(",")) == sorted(names) and len(differ) == len(names)
    assert any("evaluate every arm: to do: again" in line for line in lines)
    cured = nemo_rod("run", *words, rebuild[0], "dry_run=true")
    assert cured.returncode == 0, cured.stderr
    assert cured.stderr.count(": to do: again, as rebuild asks") == len(names)


def test_a_python_that_libraries_fail_under_is_refused():
    for name, value in (("PYTHONOPTIMIZE", "2"), ("PYTHONWARNINGS", "error::UserWarning")):
        done = nemo_rod("recipes", env={**os.environ, name: value})
        assert f"do not run under {name}=" in done.stderr and "unset it" in done.stderr


@pytest.mark.parametrize("command", ["run", "report", "evaluate", "train"])
def test_a_run_folder_takes_the_place_of_its_recipe(command, made_run):
    done = nemo_rod(command, "run", "dry_run=true", cwd=made_run.parent)
    assert done.returncode == 0, done.stderr
    assert command == "evaluate" or f" {made_run}/" in done.stderr.replace(",", "")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["recipe=toy", "seed=7", "dry_run=true"], "nemo-rod plan recipe=toy seed=7"),
        (["recipe=toy", "arms=[base,rod]"], "nemo-rod plan recipe=toy 'arms=[base,rod]'"),
        (["recipe=own", "--config-dir", "."], "nemo-rod plan --config-dir={} recipe=own"),
    ],
)
def test_a_launch_keeps_the_command_that_repeats_it(words, command, tmp_path, monkeypatch):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\ndefaults: [toy, _self_]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nemo-rod"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    typed: list[str] = []
    monkeypatch.setattr(recipes, "on_all_nodes", lambda *_: typed.append(typed_command(tmp_path)))
    recipes.run_recipe("plan", words)
    assert typed == [command.format(tmp_path)]


def test_a_recipe_may_name_its_run_folder(tmp_path):
    recipe = tmp_path / "my" / "recipe" / "theirs.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ndefaults: [toy_synthetic]\nrun_dir: elsewhere/x\n")
    words = ("run", "--config-dir", "my", "recipe=theirs", "dry_run=true")
    assert "elsewhere/x/blocks" in nemo_rod(*words, cwd=tmp_path).stderr
    assert "here/x/blocks" in nemo_rod(*words, "run_dir=here/x", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("command", "place"),
    [
        *(("run", "taken"), ("prepare", "taken/run"), ("report", "/proc/nothing")),
        *(("run", "x" * 300), ("report", "taken")),
    ],
)
def test_files_that_cannot_be_made_are_a_sentence(tmp_path, command, place):
    (tmp_path / "taken").write_text("")
    run_dir = tmp_path / place
    done = nemo_rod(command, "recipe=toy_synthetic", f"run_dir={run_dir}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert str(run_dir) in done.stderr or "nothing" in done.stderr


@pytest.mark.parametrize("command", ["help", "status", "curriculum"])
def test_help_loads_no_room_and_no_package(command):
    program = (
        "import contextlib, sys; from nemo_rod import cli; sys.argv[0] = 'nemo-rod'\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None): cli.main()\n"
        "print(*{'hydra', 'numpy', 'omegaconf', 'nemo_rod.run'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", program, command, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_no_help_and_no_list_imports_what_takes_seconds():
    program = (
        "import contextlib, sys; from nemo_rod import cli, parts\n"
        "with contextlib.redirect_stdout(None):\n"
        "    for words in [['recipes'], *([name, '-h'] for name in parts.names('commands'))]:\n"
        "        sys.argv = ['nemo-rod', *words]\n"
        "        with contextlib.suppress(SystemExit): cli.main()\n"
        "print(*{'torch', 'transformers', 'megatron', 'ray', 'datasets'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize(
    "verb", [*parts.names("commands"), "curriculum materialise", "import references"]
)
def test_every_command_of_paths_has_help(verb, option, monkeypatch, capsys):
    """Its arguments and keys are in it by how `Arguments` adds them."""
    monkeypatch.setattr(sys, "argv", ["nemo-rod", *verb.split(), option])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: nemo-rod {verb} ")


def test_words_belong_to_the_keys_of_a_verb_and_else_to_paths():
    parser = Arguments(prog="verb")
    parser.add_argument("path")
    parser.add_argument("other", nargs="?")
    parser.add_keys(
        Key(name="b", value="B", help=""), Key(name="d", value="D", help="a number", read=int)
    )
    for words in (["a=0", "b=1=1", "c=2"], ["b=1=1", "a=0", "c=2"], ["a=0", "c=2", "b=1=1"]):
        options = parser.parse_args(words)
        assert (options.path, options.other, options.b, options.d) == ("a=0", "c=2", "1=1", None)
    assert parser.parse_args(["a", "d=3"]).d == 3
    assert "d=D" in parser.format_help() and "other" in parser.format_help()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("inspect", True), ("doctor recipe=toy", True), ("run --help", False), ("train", False),
        ("train recipe=toy --help", False), ("train --config-path x --config-name config", False),
        ("train job=a.py:f", False), ("reference recipe=toy arm=base", False),
        ("reference --config-dir my recipe=mine", False),
        ("merge", False),
        ("merge recipe=toy arm=merge_0.4", False), ("merge -m recipe=toy", False),
        ("merge base adapted", True), ("merge a=b c d lambda=0.5", True), ("report", False),
        ("report recipe=toy report.seeds=[a]", False), ("report checkpoints/rod", True),
    ],
)  # fmt: skip
def test_paths_or_a_recipe(line, expected):
    name, *words = line.split()
    assert cli.takes_paths(name, words) is expected


@pytest.mark.parametrize(
    ("error", "status"), [(OSError, 2), (RuntimeError, 1), (Stopped, 75), (KeyboardInterrupt, 130)]
)
def test_a_stop_and_a_failed_job_have_a_status_of_their_own(error, status, capsys):
    with pytest.raises(SystemExit) as left, errors_in_one_sentence():
        raise error("rank 1:\nfailed")
    said = "stopped by Ctrl-C" if error is KeyboardInterrupt else "rank 1: failed"
    assert (left.value.code, capsys.readouterr().err) == (status, f"nemo-rod: {said}\n")


def test_a_missing_package_is_named_with_its_smallest_extra(capsys):
    with pytest.raises(SystemExit), errors_in_one_sentence():
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert "[data]" in capsys.readouterr().err


def test_dry_run_shows_the_stages_and_then_refuses(tmp_path):
    done = nemo_rod("run", "recipe=toy_synthetic", "cluster=h100_1", "dry_run=true", cwd=tmp_path)
    *stages, sentence = done.stderr.splitlines()
    assert done.returncode == 2 and len(stages) == 12 and "torch sees no GPU" in sentence


def test_a_plan_for_another_machine_is_no_mistake(tmp_path):
    words = ("recipe=toy_synthetic", "cluster=h100_1", "parallel=single")
    done = nemo_rod("plan", *words, cwd=tmp_path)
    assert done.returncode == 0 and "Note: a run is refused here: cluster.gpu=H100" in done.stdout


def test_too_small_a_disk_is_a_matter_of_this_machine(monkeypatch):
    config = composed("recipe=toy_synthetic")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10_000}))
    ((sentence, everywhere),) = beforehand.lacking(Stages(config).all(), config)
    assert not everywhere and "and 10 kB are free there: choose another run_dir" in sentence


def test_a_silent_hub_costs_its_seconds_once(monkeypatch):
    pytest.importorskip("huggingface_hub")
    asked: list[hub.Repository] = []

    def silent(repository: hub.Repository) -> None:
        asked.append(repository)
        time.sleep(5)

    monkeypatch.setattr(hub, "check_access", silent)
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    config = composed("recipe=german_qwen3_0_6b", "~cluster", "arms=[base]", "model.hf=own/silent")
    began = time.monotonic()
    for _ in range(2):
        ((sentence, everywhere),) = beforehand.lacking(Stages(config).all(), config)
    assert time.monotonic() - began < 5 and len(asked) == len({*asked})
    assert not everywhere and "domain.sources" in sentence
    assert "model.hf=own/silent" in sentence and "the hub does not answer within 0 s" in sentence


def test_what_the_hub_lacks_is_named_by_its_key(monkeypatch):
    pytest.importorskip("huggingface_hub")

    def refuse(repository: hub.Repository) -> None:
        if repository.name == "own/none":
            raise ValueError("The hub has no model own/none that this account may read.")

    monkeypatch.setattr(hub, "check_access", refuse)
    monkeypatch.setattr(hub, "_answer", hub._answer.__wrapped__)
    config = composed("recipe=german_qwen3_0_6b", "~cluster", "arms=[base]", "model.hf=own/none")
    lacks = beforehand.lacking(Stages(config).all(), config)
    assert lacks == [("model.hf: The hub has no model own/none that this account may read.", True)]


@pytest.mark.parametrize(
    ("name", "is_name"),
    [("gpt2", True), ("Qwen/Qwen3-0.6B", True), ("a/b@main", True), ("a/b/c", False),
     *((name, False) for name in ("./a", "~/a", "/a", "a/", "a b", "a/b@", ""))],
)  # fmt: skip
def test_names_of_the_hub(name, is_name):
    assert hub.is_name(name) == is_name


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds; tests move it."""
    now = [100.0]
    monkeypatch.setattr("nemo_rod.progress.time.monotonic", lambda: now[0])
    return now


def test_resumed_work_has_its_own_pace(clock, capsys):
    progress = Progress("references/base", 10_000, unit="blocks")
    progress.start(4_000)
    clock[0] += 1
    progress.step(4_100)  # too soon for a line
    clock[0] += 9
    progress.step(5_000, "slow")
    clock[0] += 50
    progress.step(10_000)
    assert capsys.readouterr().err.splitlines() == [
        PREFIX + "references/base  5,000/10,000 blocks  slow  100 blocks/s  0:00:50 left",
        PREFIX + "references/base  10,000/10,000 blocks  100 blocks/s  0:00:00 left",
    ]


@pytest.mark.parametrize(
    ("total", "unit", "tokens", "done", "line"),
    [
        (0, "bytes", 0, 600, "600 bytes  20 bytes/s"), (0, "", 0, 600, "600"),
        (1200, "", 0, 600, "600/1,200  0:00:30 left"),
        (6, "models", 0, 2, "2/6 models  15 s a model  0:01:00 left"),
        (6, "", 4096, 2, "2/6  273 tokens/s  0:01:00 left"),
        (6, "blocks", 64, 6, "6/6 blocks  5 s a block  13 tokens/s  0:00:00 left"),
    ],
)  # fmt: skip
def test_a_line_has_what_is_known(total, unit, tokens, done, line, clock, capsys):
    progress = Progress("web", total, unit=unit, tokens=tokens)
    clock[0] += 30
    progress.step(done)
    assert capsys.readouterr().err == f"{PREFIX}web  {line}\n"
