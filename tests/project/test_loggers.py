"""`logger=`: what it accepts, whose account it uses, and which runs go on."""

import importlib.util
import json
import os
import posixpath
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import composed
from test_docs import documented

from nemo_rod import loggers

ENVIRONMENT = (
    *("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME"),
    *("WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"),
)


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that what a test sets is gone after it
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("null", ()), ("wandb", ("wandb",)), ("[tensorboard,wandb]", ("tensorboard", "wandb")),
        ("[wandb,wandb]", ("wandb",)), ("[]", ()),
    ],
)  # fmt: skip
def test_none_one_or_several(typed, names, tmp_path):
    config = composed("recipe=toy_synthetic", f"run_dir={tmp_path}", f"logger={typed}")
    assert loggers.logger_names(config.logger) == names


def test_every_logger_of_a_trainer_shows_the_metrics():
    shown: list[Any] = []
    log = SimpleNamespace(log_metrics=lambda metrics, step: shown.append((step, metrics)))
    state = SimpleNamespace(tensorboard_logger=None, wandb_logger=None)
    known = loggers.known_metrics({"step": 2, "train/lr": 1.5, "rod/threshold": None})
    loggers.show(state, 3, known)
    assert not shown
    state.mlflow_logger = state.comet_logger = log
    loggers.show(state, 3, known)
    assert shown == [(3, {"host/lr": 1.5})] * 2


FORMS = ("validation/replay/{}/loss", "rod/rho/{}")


@pytest.mark.parametrize(
    "names",
    [
        ["new (2024)", "old@v2"], ["a(1)", "a[1]", "a_1_"], ["x" * 300, "x" * 300 + "y"],
        ["../new/t", "./new/t", ".hidden/..x"], ["a\nb", "a\tb", "a\x7fb"], ["50%,x=1&y=#", "~a"],
        ["Bücher/Ä", "资料", "e:/x"], ["'", '"', "`", "$HOME", "*"], [" ", "a b", "a  b"],
        ["a//b/../c", "a/", "a/..", "/", "\u202ea", "\udcff"], ["\N{FULL BLOCK}", "😀", "0"],
    ],
)  # fmt: skip
def test_names_of_sources_are_legal_and_differ_in_every_logger(names):
    """By MLflow's own rules, as in its `_validate_metric_name`; its test if it is installed."""
    known = loggers.known_metrics(
        {form.format(n): i for i, n in enumerate(names) for form in FORMS}
    )
    for logger in ("tensorboard", "wandb", "comet", "mlflow"):
        legal = loggers.legal_names(known, logger)
        assert [*legal.values()] == [*known.values()]
        assert all(name.isprintable() for name in legal)
        alone = [loggers.legal_names({name: value}, logger) for name, value in known.items()]
        assert legal == {name: value for row in alone for name, value in row.items()}
    for name in legal:
        assert re.fullmatch(r"[/\w.\- :]{1,250}", name) and posixpath.normpath(name) == name
        if importlib.util.find_spec("mlflow"):
            from mlflow.utils.validation import _validate_metric_name

            _validate_metric_name(name)
    plain = loggers.known_metrics({FORMS[0].format("web/text_document"): 1.0})
    assert loggers.legal_names(plain, "mlflow") == plain


def test_every_metric_is_shown_once_and_what_one_looks_at_first_comes_first():
    rows = sorted(loggers.known_metrics(dict.fromkeys(documented(), 0.0)), key=str.lower)
    assert len(rows) == len(documented()), "two metrics of one name"
    first = ["adaptation_loss", "forgetting", "replay_share", "tokens_per_second", "training_loss"]
    assert rows[:5] == [f"at_a_glance/{name}" for name in first]
    assert {name.split("/")[0] for name in rows[5:]} == {"host", "rod", "rod_by_source"}
    assert [name for name in rows if name.startswith("rod/") and "<source>" in name] == []


def test_a_logger_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"wandb is not .* pip install .*\[wandb\]', or"):
        loggers.check_installed(["wandb"])


def test_wandb_without_an_account_writes_to_files_and_says_so_once(tmp_path, capsys):
    loggers.prepare_runs(["wandb"], tmp_path)
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "no account here (set WANDB_API_KEY" in output
    assert os.environ["WANDB_MODE"] == "offline"
    first = os.environ["WANDB_RUN_ID"]
    assert os.environ["WANDB_RESUME"] == "allow" and loggers.known_runs(tmp_path) == {
        "wandb": first
    }
    loggers.prepare_runs(["wandb"], tmp_path)  # resumed
    assert os.environ["WANDB_RUN_ID"] == first


@pytest.mark.parametrize("how", ["key", "netrc", "mode"])
def test_an_account_or_a_mode_of_the_users_is_left_alone(how, tmp_path, monkeypatch, capsys):
    if how == "key":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    elif how == "mode":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    else:
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password hidden\n")
    loggers.prepare_runs(["wandb"], tmp_path / "run")
    assert os.environ.get("WANDB_MODE") == ("disabled" if how == "mode" else None)
    assert capsys.readouterr().err == ""
    assert "hidden" not in (tmp_path / "run" / "loggers.json").read_text()


def test_a_second_run_of_the_process_begins_as_the_first_did(tmp_path, monkeypatch):
    """The first goes on with a run of MLflow, which its folder knows; the second begins one."""

    def environment() -> dict[str, str]:
        return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}

    params: list[object] = []
    ended: list[str] = []
    log_params = params.append
    mlflow = SimpleNamespace(log_params=log_params, end_run=lambda status: ended.append(status))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv("WANDB_RESUME", "never")  # of the user's
    loggers.keep_run(tmp_path / "rod", "mlflow", "abc")
    environments = []
    for arm, failed in (("rod", True), ("no_replay", False)):
        prepared = loggers.prepare_runs(["wandb", "mlflow"], tmp_path / arm)
        mlflow.log_params(arm)  # MLflow refuses others than those of a run's first attempt
        environments.append(environment())
        prepared.end(failed=failed)
        assert environment() == {"WANDB_RESUME": "never"} and mlflow.log_params is log_params
    assert environments[0]["MLFLOW_RUN_ID"] == "abc" and "MLFLOW_RUN_ID" not in environments[1]
    assert environments[0]["WANDB_RUN_ID"] != environments[1]["WANDB_RUN_ID"]
    uris = [values["MLFLOW_TRACKING_URI"] for values in environments]
    assert uris == [f"sqlite:///{tmp_path}/{arm}/mlflow.db" for arm in ("rod", "no_replay")]
    assert (params, ended) == (["no_replay"], ["FAILED", "FINISHED"])
    assert loggers.known_runs(tmp_path / "rod")["mlflow"] == "abc"


def test_the_users_server_serves_every_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    for arm in ("rod", "no_replay"):
        prepared = loggers.prepare_runs(["mlflow"], tmp_path / arm)
        assert os.environ["MLFLOW_TRACKING_URI"] == "http://server"
        prepared.end()
        assert os.environ["MLFLOW_TRACKING_URI"] == "http://server"


@pytest.mark.parametrize("step", [0, 6])
def test_attempts_are_one_curve(step, tmp_path):
    """What two attempts have done is the second's, and W&B gets what it lost when one was killed.

    By NeMo-RL's logger; tests/megatron/test_resume.py kills a job with real W&B.
    """
    for package in ("tensorboard", "wandb"):
        pytest.importorskip(package)
    from logged import of_tensorboard
    from torch.utils.tensorboard import SummaryWriter

    from nemo_rod.hosts.nemo_rl.algorithm import continued_logger

    class TensorboardLogger:
        def __init__(self) -> None:
            self.writer = SummaryWriter(str(tmp_path / "tensorboard"))

    class WandbLogger:
        run = SimpleNamespace(step=4, log=lambda metrics, done: sent.append((done, metrics)))

    sent: list[Any] = []
    ids: set[str] = set()
    rows = [json.dumps({"step": number, "train/lr": number / 8}) for number in range(8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    for attempt, first, last in ((1, 0, 8), (2, step, 9)):
        made = SimpleNamespace(gpu_monitor=None, loggers=[TensorboardLogger(), WandbLogger()])
        names = {"wandb_enabled": True}
        with continued_logger(lambda made=made: made, names, tmp_path, step=first) as logger:
            ids.add(os.environ["WANDB_RUN_ID"])
            for done in range(first, last):
                logger.loggers[0].writer.add_scalar("loss", attempt, done + 1)
        assert "WANDB_RUN_ID" not in os.environ and made.loggers == []
        time.sleep(2 - attempt)  # TensorBoard orders event files by the second they began in
    curve = {done: 1.0 if done <= step else 2.0 for done in range(1, 10)}
    assert of_tensorboard(tmp_path / "tensorboard")["loss"] == curve
    assert sent == [(done, {"host/lr": (done - 1) / 8}) for done in range(4, step + 1)]
    assert ids == {loggers.known_runs(tmp_path)["wandb"]}
