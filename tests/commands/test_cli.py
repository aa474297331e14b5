"""The command line: every recipe composes and validates; bad input gets one sentence."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import RECIPES, composed, nemo_rod
from made_up_run import RECIPE as RECIPE_OF_IT
from made_up_run import make_run

import nemo_rod as nemo_rod_package
from nemo_rod import cli
from nemo_rod.commands import recipes
from nemo_rod.config import Config, config_folder
from nemo_rod.run import beforehand
from nemo_rod.run.launch.render import typed_command
from nemo_rod.run.processes import pythons
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import arm_settings

LAYOUTS = sorted(file.stem for file in (config_folder() / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_validates(recipe: str) -> None:
    config = composed(f"recipe={recipe}")
    assert config.recipe == recipe
    assert config.run_dir == f"runs/{recipe}"
    kinds = {arm_settings(config, name).kind for name in config.arms}
    assert kinds <= {"base", "trained", "merged"}
    roles = {spec.role for spec in config.domain.specs}
    assert roles == {"adaptation", "replay"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_serves_the_toy(layout: str) -> None:
    size = (f"{name}.micro_batch_size=2" for name in ("train", "pretrain"))  # for 8 replicas
    assert composed("recipe=toy", f"parallel={layout}", *size).parallel.world_size >= 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["parallel.tensor=3"], "tensor=3 does not divide num_attention_heads=4"),
        (["parallel.pipeline=3"], "virtual_pipeline=1 does not divide num_hidden_layers=2"),
        (["parallel.data=3"], "train.micro_batch_size=16 on parallel.data=3 replicas"),
        (["parallel.virtual_pipeline=2"], "virtual_pipeline=2 needs parallel.pipeline > 1"),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], "makes 1: change one"),
        (["parallel.sequence=true"], "sequence=true needs parallel.tensor > 1"),
        (["parallel.expert=3"], "parallel.expert=3 must divide data x tensor x context = 2"),
        (["parallel.expert=2"], "expert=2 does not divide num_experts=1"),
        (["parallel.expert=2", "parallel.tensor=2"], "needs parallel.sequence=true"),
        (["train.batch_size=33"], "train.batch_size=33 does not divide"),
        (["domain.block_size=100", "parallel.context=4"], "prefix=1 leaves 100 tokens"),
        (["domain.holdout_fraction=0"], "domain.holdout_fraction=0 leaves no block on which arms"),
        (["model.hf=a/model"], "must name its base model once"),
        (["scoring.every=4", "launcher=nemo_rl"], "rod has scoring.every=4, which NeMo-RL's"),
        (["scoring.every=4", "scoring.prefix=1/2"], "scoring sets every=4 and prefix=1/2"),
        (["scoring.prefix=1/8", "parallel.context=16", "domain.block_size=128"],
         "scoring.prefix=1/8 leaves 16 tokens"),
        (
            [
                "scoring.prefix=1/8", "parallel.tensor=2", "parallel.sequence=true",
                "domain.block_size=8",
            ],
            "need a multiple of 2; choose a longer prefix",
        ),
        (["model.architecture.num_key_value_heads=null"],
         "model.architecture.num_key_value_heads=None is not valid: expected a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        composed("recipe=toy", *overrides)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["recipe=nope"], f"There is no recipe=nope: expected one of {', '.join(RECIPES)}."),
        (
            ["recipe=toy", "train.stepz=3"],
            "There is no key train.stepz (did you mean train.steps?): "
            "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values.",
        ),
        *(
            (["recipe=toy", word], f"{word} is not valid: expected {expected}.")
            for word, expected in (
                ("train.lr=high", "a number"), ("train.steps=1.5", "a whole number"),
                ("dry_run=maybe", "true or false"), ("train.steps=null", "a value other than null"),
                ("arms={a: 1}", "a list, [...]"), ("cluster.setup=x", "a list, [...]"),
                ("domain.sources=[a]", "keys and values, {KEY: VALUE}"),
                ("cluster.sbatch=x", "keys and values, {KEY: VALUE}"),
            )
        ),
        (
            ["recipe=toy", "launcher=3"],
            "launcher=3 is a number where Hydra expects the name of a file: choose one of local, "
            "nemo_rl, ray, slurm; a name of digits needs nested quotes, "
            "\"launcher='1'\".",
        ),
        (
            ["recipe=toy", "hydra.job.env_copy=[NOPE]"],
            "Hydra cannot compose the recipe (KeyError: 'NOPE'): "
            "`nemo-rod run recipe=NAME --cfg job` prints all keys and their values.",
        ),
        (
            ["recipe=toy", "seed=${nope}"],
            "Key 'seed' has a reference that cannot be resolved (Interpolation key 'nope' not "
            "found): set the key in its ${...}, or write a value there.",
        ),
    ],
)  # fmt: skip
def test_what_hydra_cannot_compose_is_one_sentence(words: list[str], sentence: str) -> None:
    done = nemo_rod("run", *words)
    assert done.returncode == 2
    assert done.stderr == f"nemo-rod: {sentence}\n"


MISTYPED = {  # what is typed -> a part of the sentence that answers it
    "": "`nemo-rod run` needs a recipe: try recipe=toy_synthetic; `nemo-rod recipes` lists all",
    "toy": "toy is not KEY=VALUE: did you mean recipe=toy?",
    "toi": "toi is not KEY=VALUE, such as recipe=toy (did you mean toy?).",
    "recipe = toy": "There is a space around '=': did you mean recipe=toy?",
    "recipe= toy": "There is a space around '=': did you mean recipe=toy?",
    "recipe=toy seed =3": "There is a space around '=': did you mean seed=3?",
    "recipe=toy arms=[rod, base]": "there is a space before base]: write it without",
    "--recipe toy": "There is no option --recipe: did you mean recipe=toy?",
    "recipe=toy --dry-run": "There is no option --dry-run: did you mean dry_run=true?",
    "recipe=toy --seed=3": "There is no option --seed: did you mean seed=3?",
    "recipe=toy --mutlirun": "There is no option --mutlirun: did you mean --multirun?",
    "recipe=toy --dryrun": "There is no option --dryrun: did you mean dry_run=true?",
    "recipe=toy -n": "There is no option -n: did you mean dry_run=true?",
    "recipe=toy --tp 2": "There is no option --tp: did you mean parallel.tensor=2?",
    "recipe=toy --arms rod": "There is no option --arms: did you mean arms=[rod]?",
    "recipe=toy \u2014seed 3": "There is no option --seed: did you mean seed=3?",
    "recipe=\u201ctoy\u201d": "the quotes are those of print: type ' or \".",
    "recipe=toy seed==3": "expected KEY=VALUE; type seed=3.",
    "recipe=toy steps=3": "(did you mean train.steps or",
    "recipe=toy TRAIN.LR=1": "(did you mean train.lr?)",
    "recipe=toy +train.lrr=1": "There is no key train.lrr (did you mean train.lr?)",
    "recipe=[toy]": "is a list where one name is expected: recipe=toy, say.",
    "tasks=[arc_easy,piqa]": "tasks=held_out, say (tasks of lm-eval: tasks=none "
    "'tasks.capabilities={mine:[arc_easy,piqa]}').",
    "recipe=TOY": "There is no recipe=TOY (did you mean toy?)",
    "recipe=toy arms=[fixed32]": "(did you mean fixed_32?)",
    "recipe=toy arm=rod,base": "add -m for a run of each, or write arms=[rod,base].",
    "recipe=toy run_dir=$HOME/x": "has a variable that the shell did not replace",
    "recipe=toy run_dir=/dev/null/x": "/dev/null is a file, not a folder.",
    "recipe=toy --config-dir nope": "--config-dir nope: there is no such folder.",
    "recipe=toy --cfg all_of_it": "invalid choice: 'all_of_it'",
    "recipe=my/recipe/mine.yaml": "did you mean --config-dir my recipe=mine?",
    "my/mine.yaml": "move it to my/my/recipe/mine.yaml, and type --config-dir my/my recipe=mine",
    "recipe=toy.yaml": "is a file where a name is expected: did you mean recipe=toy?",
    "recipe=toi": "There is no recipe=toi (did you mean toy?): expected one of german",
    "recipe=toy launcher=slrum": "There is no launcher=slrum (did you mean slurm?)",
    "recipe=toy launcher.kind=slrum": "is not valid (did you mean slurm?)",
    "recipe=toy selection.score=lossy": "selection.score='lossy' is not valid",
    "recipe=": "needs a recipe: try recipe=toy_synthetic",
    "recipe=null": "needs a recipe: try recipe=toy_synthetic",
    "recipe:toy": "recipe:toy has no =: did you mean recipe=toy?",
    "recipe toy": "recipe has no value: did you mean recipe=toy?",
    "recipe=toy,toy_synthetic": "has several values: add -m for a run of each.",
    "recipe=toy learning_rate=1e-4": "(did you mean train.lr?)",
    "recipe=toy train.learning_rate=1": "(did you mean train.lr?)",
    "recipe=toy parallel.tp=2": "(did you mean parallel.tensor?)",
    "recipe=toy train={stepz:3}": "(did you mean train.steps?)",
    "recipe=toy model.architecture.hidden_size=wide": "expected a whole number >= 0.",
    "recipe=toy output_dir=here": "(did you mean run_dir?)",
    "recipe=toy ~train": "~train takes away what every run needs: give train a value instead.",
    "recipe=toy ~seed": "~seed takes away what every run needs: give seed a value instead.",
    "recipe=toy_synthetic rebuild=[rodd]": (
        "rebuild=[rodd] is not a stage (did you mean rod?): expected some"
    ),
    "recipe=toy arms=[rod": "arms=[rod is not an override in Hydra's grammar (",
    "recipe=toy arms=[rod,]": "expected KEY=VALUE; a list is [A,B], without spaces",
    "recipe=toy arms=[ü]": """, or '["A","B"]' with =, ü or the like""",
    "recipe=toy run_dir=~/here": 'the shell replaces no ~ there: type "$HOME"',
    "recipe=toy model=null": "The recipe must name its base model once: set model.hf to",
    "recipe=toy step=3": "step=3 is of export and evaluate: did you mean train.steps=3?",
    "recipe=toy domain.tokenizer=bytes": "is no tokenizer: did you mean byte?",
    "recipe=toy dry_run": "dry_run has no value: did you mean dry_run=true?",
    "recipe=toy =3": "=3 has no key: expected KEY=VALUE.",
    "recipe=toy seed=1,2": "seed=1,2 has several values: add -m for a run of each",
    "recipe=toy paralel=tp2": "There is no key paralel (did you mean parallel?)",
    "recipe=toy arms=rod": "arms is a list: did you mean arms=[rod]?",
    "recipe=toy arms=rod,base": "arms is a list: did you mean arms=[rod,base]?",
    "recipe=toy arm=rood": "There is no arm 'rood' (did you mean rod?): expected base,",
    "recipe=toy arms=[rod_averges]": "(did you mean rod_averages?)",
    "recipe=toy arms=[fixed_0.2]": "(did you mean fixed_20? It is a percentage, of 1 or more)",
    "recipe=toy arms=[merge_60]": "(did you mean merge_0.6? It is a weight from 0 to 1)",
    "recipe=toy selection.policy_options.x=1": "does not take selection.policy_options={'x': 1}",
    "recipe=toy cluster.env.WANDB_API_KEY=x": "cluster.env.WANDB_API_KEY would be written",
    "recipe=toy logger=comet": "logger='comet' is not valid",
}


@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_word_is_answered_by_its_cure(line: str, tmp_path: Path) -> None:
    done = nemo_rod("run", *line.split(), "dry_run=true", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert MISTYPED[line] in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("line", ["--help", "--version", "init my", "run recipe=toy --cfg job"])
@pytest.mark.parametrize("is_errors", [False, True])
def test_a_closed_pipe_ends_a_command_silently(line: str, is_errors: bool, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "nemo_rod.cli", *line.split()]
    outputs = (writer, writer if is_errors else subprocess.PIPE)
    done = subprocess.run(words, stdout=outputs[0], stderr=outputs[1], cwd=tmp_path, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (128 + signal.SIGPIPE, b"")


def test_what_hydra_logs_to_a_closed_pipe_is_no_traceback() -> None:
    words = [sys.executable, "-m", "nemo_rod.cli", *["run", "recipe=toy", "--info", "defaults"]]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ("seed=7", [7]),
        ("seed=1,2 -m", [1, 2]),
        ("seed=1,2 -m train.steps=3 cluster.mounts=[/a:/b] cluster.image=/a%b.sqsh", [1, 2]),
    ],
)
def test_a_sweep_has_a_folder_for_each_job_and_leaves_no_file(
    words: str, seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    words = f"{sys.executable} -m nemo_rod.cli plan recipe=toy"
    line = f"mkdir gone && cd gone && rmdir ../gone && {words}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "The working folder has been removed: " in done.stderr


def test_an_empty_word_is_named(tmp_path: Path) -> None:
    done = nemo_rod("run", "recipe=toy", "", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "There is an empty word: leave it out" in done.stderr


def test_dictionaries_need_no_plus(tmp_path: Path) -> None:
    words = ("cluster.env.NAME=x", "domain.sources.dialect.max_documents=3", "--cfg", "job")
    done = nemo_rod("run", "recipe=toy_synthetic", *words, cwd=tmp_path)
    assert "NAME: x" in done.stdout and "max_documents: 3" in done.stdout, done.stderr


def test_a_recipe_in_a_folder_that_was_not_named_is_found(tmp_path: Path) -> None:
    assert nemo_rod("init", "my", cwd=tmp_path).returncode == 0
    done = nemo_rod("run", "recipe=mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "There is no recipe=mine (did you mean --config-dir my?)" in done.stderr


TWO_FORMS = {"train", "reference", "merge", "report"}


@pytest.mark.parametrize("verb", sorted({*cli.recipe_commands()} - TWO_FORMS))
def test_help_of_every_command_on_a_recipe(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ((verb, "--help"), (verb, "recipe=toy", "-h"), ("help", verb)):
        monkeypatch.setattr(sys, "argv", ["nemo-rod", *words])
        with suppress(SystemExit):
            cli.main()
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: nemo-rod {verb} recipe=NAME [KEY=VALUE ...]")
        assert f"  nemo-rod {verb} " in shown and "rebuild=[STAGE,...]" in shown


def test_version() -> None:
    assert nemo_rod("--version").stdout == f"nemo-rod {nemo_rod_package.__version__}\n"


def test_recipes_are_listed_with_their_hours(tmp_path: Path) -> None:
    assert nemo_rod("init", "my", cwd=tmp_path).returncode == 0
    listed = nemo_rod("recipes", "--config-dir", "my", cwd=tmp_path)
    rows = [line for line in listed.stdout.splitlines() if line[0] != " "]
    assert [row.split()[0] for row in rows] == ["recipe", *sorted([*RECIPES, "mine"])]
    assert all(len(row.split()) > 4 for row in rows[1:]) and listed.stderr == "", listed.stdout
    done = nemo_rod("recipes", "--config-dir", "my", "plan=true", cwd=tmp_path)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["recipe", *sorted([*RECIPES, "mine"])]
    assert all(len(row) > 6 for row in rows), done.stdout
    assert done.stderr == ""
    (tmp_path / "my" / "recipe" / "mine.yaml").write_text("a: [")
    done = nemo_rod("recipes", "--config-dir", "my", "plan=true", cwd=tmp_path)
    assert done.returncode == 0 and "mine: while parsing a flow" in done.stderr, done.stderr


def test_the_recipe_of_init_can_be_planned_and_run(tmp_path: Path) -> None:
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
def test_a_folder_that_no_recipe_can_name_is_refused(name: str, tmp_path: Path) -> None:
    done = nemo_rod("init", name, cwd=tmp_path)
    assert (done.returncode, [*tmp_path.iterdir()]) == (2, [])
    assert "cannot be in a recipe: choose a folder" in done.stderr


def test_what_init_prints_can_be_typed_and_any_terminal_can_show_it(tmp_path: Path) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = nemo_rod("init", "my grün", cwd=tmp_path, env=ascii_only)
    assert done.returncode == 0 and r"my gr\xfcn/recipe/mine.yaml: written" in done.stdout
    assert r"nemo-rod run --config-dir 'my gr\xfcn' recipe=mine" in done.stdout
    assert "my grün/text/*.txt" in (tmp_path / "my grün/recipe/mine.yaml").read_text("utf-8")


UNREADABLE = {  # content of a recipe -> part of the sentence about it
    "defaults: [toy_synthetic, _self_]\n": "mine.yaml does not begin with '# @package _global_'",
    "defaults: [override /model: toy_qwen3]\n": "mine.yaml does not begin with '# @package _gl",
    "# @package _global_\ndefaults: [mine]\n": "(the `defaults` of a file lead back to it)",
    "# @package _global_\ntrain: {steps: '${'}\n": "Key 'train.steps' is not valid; no viable",
    "# @package _global_\n? [a]\n: 3\n": "mine.yaml",
}


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_recipe_that_cannot_be_composed_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(content)
    (tmp_path / "recipe" / "gone.yaml").symlink_to("nowhere")  # which no error is about
    (tmp_path / "recipe" / "mark.yaml").write_text("\ufeff")
    done = nemo_rod("run", "--config-dir", tmp_path, "recipe=mine", "dry_run=true")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert UNREADABLE[content] in done.stderr


def test_a_recipe_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(b"\xff")
    done = nemo_rod("run", "--config-dir", tmp_path, "recipe=mine")
    assert done.returncode == 2
    assert done.stderr == (
        "nemo-rod: recipe/mine.yaml is not a configuration (UnicodeDecodeError: 'utf-8' codec "
        "can't decode byte 0xff in position 0: invalid start byte): correct the file.\n"
    )


BAD_TEXT = {
    "missing field": ('{"body": "x"}\n', ":1: no field 'text' (found: body)"),
    "empty corpus": ("", "source dialect has no document"),
    "shorter than one block": ('{"text": "ab"}\n', "has 3 tokens, fewer than one block of 64"),
    "not json": ("hello\n", "documents.jsonl:1"),
}


@pytest.mark.parametrize("what", BAD_TEXT)
def test_bad_text_is_one_sentence_and_leaves_nothing(what: str, tmp_path: Path) -> None:
    content, sentence = BAD_TEXT[what]
    (tmp_path / "documents.jsonl").write_text(content)
    done = nemo_rod(
        *("prepare", "recipe=toy_synthetic", f"run_dir={tmp_path / 'run'}"),
        "domain.sources.dialect.kind=jsonl",
        f"domain.sources.dialect.files=[{tmp_path / 'documents.jsonl'}]",
    )
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("nemo-rod: ")
    assert sentence in error
    assert "Traceback" not in done.stderr
    assert [file.name for file in tmp_path.glob("run/*")] in ([], ["launch"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prepare", "+domain.sources.dialect.max_byte=3"],
         "domain.sources.dialect has the unknown key 'max_byte'"),
        (["train", "arm=rod"], "run `nemo-rod prepare recipe=toy_synthetic` first"),
        (["run", "run_dir="], "run_dir is empty"),
        (["reference", "arm=rod"], "arm=rod is not a reference model: expected base, no_replay"),
        (["train", "arms=[base]", "dry_run=true"], "There is nothing to train among ['base']"),
        (["plan", "arm=röd"], "letters such as ü need nested quotes, \"arm='röd'\""),
    ],
)  # fmt: skip
def test_a_refusal_is_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    command, *overrides = words
    done = nemo_rod(command, "recipe=toy_synthetic", f"run_dir={tmp_path}", *overrides)
    *titles, error = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("nemo-rod: ") and sentence in error
    assert all(title.startswith("[1/1] ") for title in titles)


def test_dry_run_lists_every_stage_and_makes_none(tmp_path: Path) -> None:
    done = nemo_rod("run", "recipe=toy", f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == 17
    assert "nemo-rod prepare" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", cli.recipe_commands())
def test_dry_run_of_every_command_says_something_and_does_nothing(
    command: str, tmp_path: Path
) -> None:
    words = ("arm=rod", "step=10") if command == "export" else ()
    done = nemo_rod(command, "recipe=toy", *words, "dry_run=true", cwd=tmp_path)
    assert done.returncode == (2 if command == "evaluate" else 0), done.stderr  # of what is missing
    assert done.stdout + done.stderr and not [*tmp_path.iterdir()]


def test_a_command_of_another_package_is_not_called_with_dry_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_null_leaves_out_the_cluster_of_a_recipe(tmp_path: Path) -> None:
    done = nemo_rod("run", "recipe=german_qwen3_0_6b", "cluster=null", "--cfg", "job", cwd=tmp_path)
    assert "  gpu: null" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "visible", "devices", "sentence"),
    [
        (["cluster=h100_1"], "0", 0, "cluster.gpu=H100, but torch sees no GPU on this machine"),
        (["cluster=h100_1", "parallel=single"], "0", 1, None),
        (["cluster=h100_1", "parallel=dp2"], "0", 1, "parallel puts 2 processes on this machine"),
        (["parallel=dp2"], "0", 1, "where torch sees 1 GPU: each needs one"),
        (["parallel=dp2"], "0", 0, None),
        (["cluster=h100_1"], "", 1, "cluster.gpu=H100, but torch sees no GPU"),
        (["cluster=b200_8", "parallel=dp8", "launcher=slurm"], "0", 0, None),
    ],
)
def test_processes_have_the_gpus_that_the_cluster_names(
    words: list[str],
    visible: str,
    devices: int,
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pythons, "sees_gpu", lambda: True)
    monkeypatch.setattr(beforehand, "sees_gpu", lambda: True)
    monkeypatch.setattr(
        pythons.subprocess,
        "run",
        lambda *_, **__: SimpleNamespace(stdout=f"{devices}\n", returncode=0),
    )
    size = (f"{name}.micro_batch_size=2" for name in ("train", "pretrain"))
    config = composed("recipe=toy_synthetic", *words, *size)
    lacks = beforehand.lacking(Stages(config).all(), config)
    assert [str(sentence) in lack.sentence for lack in lacks] == [True] * (sentence is not None), (
        lacks
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, of made-up numbers."""
    run_dir = tmp_path_factory.mktemp("made") / "run"
    make_run(run_dir)
    return run_dir


OTHER_INPUTS = {  # what is changed -> stages that were made with something else, and the first
    "seed=43": (["no_replay", "fixed_32", "rod", "merge_0.6", "references_specialist"], "seed=42"),
    "train.lr=1e-5": (
        ["no_replay", "fixed_32", "rod", "merge_0.6", "references_specialist"],
        "train.lr=0.001",
    ),
    "selection.kappa=2": (["rod"], "selection.kappa=1.0"),
}


@pytest.mark.parametrize("change", OTHER_INPUTS)
def test_dry_run_and_refusal_name_all_that_differs_at_once(change: str, made: Path) -> None:
    names, value = OTHER_INPUTS[change]
    words = (*RECIPE_OF_IT, f"run_dir={made}", change)
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


def test_dry_run_of_what_is_there_says_so(made: Path) -> None:
    done = nemo_rod("run", *RECIPE_OF_IT, f"run_dir={made}", "dry_run=true")
    assert done.returncode == 0 and done.stderr.count(": done  (") >= 8, done.stderr


@pytest.mark.parametrize("command", ["run", "report", "evaluate", "train"])
def test_a_run_folder_takes_the_place_of_its_recipe(command: str, made: Path) -> None:
    done = nemo_rod(command, "run", "dry_run=true", cwd=made.parent)
    assert done.returncode == 0, done.stderr
    assert command == "evaluate" or f" {made}/" in done.stderr.replace(",", "")


def test_a_run_folder_switches_on_no_code(tmp_path: Path) -> None:
    config = tmp_path / "run" / "launch" / "local" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("selection: {policy: 'theirs.py:Policy'}\n")
    done = nemo_rod("report", "run", cwd=tmp_path)
    assert done.returncode == 2 and "names code, theirs.py:Policy, which a folder" in done.stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["recipe=toy", "seed=7", "dry_run=true"], "nemo-rod plan recipe=toy seed=7"),
        (["recipe=toy", "arms=[base,rod]"], "nemo-rod plan recipe=toy 'arms=[base,rod]'"),
        (["recipe=own", "--config-dir", "."], "nemo-rod plan --config-dir={} recipe=own"),
    ],
)
def test_a_launch_keeps_the_command_that_repeats_it(
    words: list[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\ndefaults: [toy, _self_]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nemo-rod"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    typed: list[str] = []
    monkeypatch.setattr(recipes, "on_all_nodes", lambda *_: typed.append(typed_command()))
    recipes.run_recipe("plan", words)
    assert typed == [command.format(tmp_path)]


def test_a_recipe_may_name_its_run_folder(tmp_path: Path) -> None:
    recipe = tmp_path / "my" / "recipe" / "theirs.yaml"
    recipe.parent.mkdir(parents=True)
    head = "# @package _global_\ndefaults: [toy_synthetic, _self_]\n"
    recipe.write_text(head + "run_dir: elsewhere/x\n")
    words = ("run", "--config-dir", "my", "recipe=theirs", "dry_run=true")
    assert "elsewhere/x/blocks" in nemo_rod(*words, cwd=tmp_path).stderr
    assert "here/x/blocks" in nemo_rod(*words, "run_dir=here/x", cwd=tmp_path).stderr


# A run_dir whose files cannot be made, and what there is in its place.
UNWRITABLE = {
    "a file": lambda folder: (folder / "taken").write_text("") or folder / "taken",
    "below a file": lambda folder: (folder / "taken").write_text("") or folder / "taken" / "run",
    "no file system for files": lambda folder: Path("/proc/nothing"),
    "a name that is too long": lambda folder: folder / ("x" * 300),
}


@pytest.mark.parametrize("place", UNWRITABLE)
@pytest.mark.parametrize("command", ["run", "prepare", "report"])
def test_files_that_cannot_be_made_are_a_sentence(tmp_path: Path, command: str, place: str) -> None:
    run_dir = UNWRITABLE[place](tmp_path)
    done = nemo_rod(command, "recipe=toy_synthetic", f"run_dir={run_dir}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert str(run_dir) in done.stderr or "nothing" in done.stderr


@pytest.mark.parametrize("command", ["help", "status", "cancel", "curriculum"])
def test_help_loads_no_room_and_no_package(command: str) -> None:
    program = (
        "import contextlib, sys; from nemo_rod import cli; sys.argv[0] = 'nemo-rod'\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None): cli.main()\n"
        "print(*{'hydra', 'numpy', 'omegaconf', 'nemo_rod.run'} & {*sys.modules})"
    )
    words = [sys.executable, "-c", program, command, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_no_help_and_no_list_imports_what_takes_seconds() -> None:
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
