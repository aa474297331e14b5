"""NVIDIA's functions are what was tested, all that matter are listed, and others are refused."""

import ast
import functools
import importlib
import json
import os
import queue
import re
import signal
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT

from nemo_rod.installation import clash
from nemo_rod.lab import doctor
from nemo_rod.upstream import changes, functions
from nemo_rod.upstream.functions import FUNCTIONS, Function

# importing Megatron warns of what a machine without CUDA lacks
pytestmark = pytest.mark.filterwarnings("ignore")

LISTED = {function.where.replace(":", ".") for function in FUNCTIONS}
HERE = (
    *("scoring", "trainer", "swap_in/megatron_bridge"),
    *("cpu", "cpu/megatron_bridge", "plain", "plain/megatron_bridge"),
)


@pytest.fixture(scope="module", autouse=True)
def megatron():
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA


DEPRECATED = re.compile("GPTModel|.*ModelProvider|gpt_model|gpt_provider")


def test_no_module_needs_a_class_that_nvidia_is_about_to_delete():
    """Main of Megatron-LM makes every model a HybridModel, and main of Bridge by builders."""
    for file in sorted((ROOT / "nemo_rod").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(name.name for name in node.names)]
                parts = {part for name in names for part in name.split(".")}
                assert not [part for part in parts if DEPRECATED.fullmatch(part)], file


# The installed version


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.where)
def test_what_is_installed_was_tested(function):
    if not {*HERE} & {*function.roads}:
        pytest.skip("another host")
    assert function.problem() is None
    signature = function.installed_signature()
    if function.tested and signature is not None:
        assert ", ".join(signature.parameters) in function.signatures


def test_every_road_has_functions():
    assert {road for function in FUNCTIONS for road in function.roads} == {*functions.ROADS}
    assert all(function.package for function in FUNCTIONS)
    functions.check(*HERE)
    assert doctor.function_counts().startswith(
        f"scoring {len(functions.for_road('scoring'))}, trainer "
    )


# Nothing is missing from the list


@functools.cache
def parts() -> list[tuple[ast.AST, dict[str, str]]]:
    """Top-level statements of the package, with the names that are NVIDIA's in each of them."""
    pairs = []
    for file in sorted((ROOT / "nemo_rod").rglob("*.py")):
        module = ast.parse(file.read_text())
        everywhere = dict(imported(*module.body))
        for statement in module.body:
            names = everywhere | dict(imported(*ast.walk(statement)))
            for node in ast.walk(statement):  # make = WrappedTorchNorm.__new__
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if isinstance(target, ast.Name) and (meant := theirs(node.value, names)):
                        names[target.id] = meant
            pairs.append((statement, names))
    return pairs


def imported(*nodes: ast.AST) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and re.match(r"(megatron|nemo)\b", node.module or ""):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def theirs(node: ast.AST, names: dict[str, str]) -> str | None:
    """Full name of something of NVIDIA's; None for all else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (home := theirs(node.value, names)):
        return f"{home}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
        return theirs(node.args[1], names)
    return None


def replaced(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """What gets another value: by `a.b = c`, `installed.replace(a, "b", c)` or `patching`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for place in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(place, ast.Attribute) and (name := theirs(place, names)):
                    yield name
    call = getattr(node, "func", None)
    if getattr(call, "attr", getattr(call, "id", "")) in ("replace", "patching") and node.args:
        home = theirs(node.args[0], names)
        if home is not None and isinstance(node.args[1], ast.Constant):
            yield f"{home}.{node.args[1].value}"


def test_all_that_is_replaced_is_listed():
    replaced_ones = {
        name
        for statement, names in parts()
        for node in ast.walk(statement)
        for name in replaced(node, names)
    }
    assert "megatron.bridge.training.train.train_step" in replaced_ones
    assert "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__" in replaced_ones
    # no functions of theirs: one is defined where they forgot to, the others are Python's
    assert replaced_ones - LISTED == {
        "megatron.core.transformer.moe.moe_utils.te_general_gemm",
        "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue",
        "megatron.core.dist_checkpointing.strategies.filesystem_async.mp",
    }


def test_all_that_is_called_with_several_places_is_listed():
    called = {
        name
        for statement, names in parts()
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and (name := theirs(node.func, names))
        if sum(not isinstance(argument, ast.Starred) for argument in node.args) > 1
    }
    assert "megatron.bridge.training.pretrain.pretrain" in called
    assert called <= LISTED


def test_all_that_is_overridden_is_listed():
    overridden = set()
    for statement, names in parts():
        if isinstance(statement, ast.ClassDef):
            for base in filter(None, (theirs(base, names) for base in statement.bases)):
                home, _, name = base.rpartition(".")
                their_class = getattr(importlib.import_module(home), name)
                methods = [n.name for n in statement.body if isinstance(n, ast.FunctionDef)]
                overridden |= {
                    f"{base}.{m}" for m in methods if m[0] != "_" and hasattr(their_class, m)
                }
    assert "megatron.bridge.training.callbacks.Callback.on_train_end" in overridden
    assert overridden <= LISTED


# What is refused


@pytest.mark.parametrize(
    ("use", "relies_on", "installed", "fits"),
    [
        ("called", "batch, cp_group", lambda batch, cp_group=None: 0, True),
        ("called", "batch, cp_group", lambda batch, cp_group=None, more=1: 0, True),
        ("called", "batch, cp_group", lambda batch, is_hybrid_cp, cp_group=None: 0, False),
        ("called", "batch, cp_group", lambda cp_group, batch: 0, False),
        ("called", "batch, cp_group", lambda batch, *, cp_group=None: 0, False),
        ("called", "batch, cp_group", lambda batch: 0, False),
        ("called", "batch", lambda batch, needed: 0, False),
        ("called", "batch, *, needed", lambda batch, *, needed: 0, True),
        ("called", "path", lambda path, **options: 0, True),
        ("called", "*, config, group", lambda group, config: 0, True),
        ("called", "*, config, group", lambda group, settings: 0, False),
        ("wrapped", "*, schedule", lambda model, new, schedule: 0, True),
        ("wrapped", "*, schedule", lambda model, plan: 0, False),
        ("wrapped", "cls, config", lambda cls, config, size: 0, True),
        ("wrapped", "cls, config", lambda cls, size, config: 0, False),
        ("wrapped", "cls, config", lambda *args, **kwargs: 0, True),
        ("replaced", "tensor, as_numpy", lambda tensor, as_numpy=False: 0, True),
        ("replaced", "tensor, as_numpy", lambda tensor: 0, True),
        ("replaced", "tensor, as_numpy", lambda tensor, as_numpy, stream: 0, False),
        ("replaced", "self, ...", lambda self, anything: 0, True),
        ("read", "*, state, model", lambda model, state, more: 0, True),
        ("read", "*, state, model", lambda model: 0, False),
    ],
)
def test_what_fits(use, relies_on, installed, fits):
    function = Function("somewhere:f", use, ("scoring",), relies_on)
    assert function.fits(functions.inspect.signature(installed)) is fits


def test_a_parameter_that_moved_is_refused_in_one_sentence(monkeypatch):
    """The group was the second parameter up to megatron-core 0.17; then a switch took its place."""
    from megatron import core

    moved = Function("megatron.core.utils:cut", "called", ("scoring",), "batch, cp_group")
    monkeypatch.setattr(functions, "FUNCTIONS", (moved,))
    monkeypatch.setattr(core, "__version__", "0.18.0")
    monkeypatch.setattr(core.utils, "cut", lambda batch, is_hybrid, cp_group=0: 0, raising=False)
    with pytest.raises(ValueError) as refusal:
        functions.check("trainer", "scoring")
    assert str(refusal.value) == (
        "megatron.core.utils.cut takes (batch, is_hybrid, cp_group) in megatron-core 0.18.0: "
        "expected (batch, cp_group), with which nemo_rod was tested; install megatron-core 0.16.1 "
        "to 0.19.2, or a newer nemo_rod."
    )


def test_training_and_scoring_ask_before_anything_else(monkeypatch):
    from megatron.core import utils

    from nemo_rod.megatron import models, train_job

    monkeypatch.setattr(utils, "get_model_config", lambda chunk, model: model.config)
    sentence = r"utils.get_model_config takes \(chunk, model\) in megatron-core"
    nothing: Any = None
    with pytest.raises(ValueError, match=sentence):
        train_job.train(nothing)
    with pytest.raises(ValueError, match=sentence):
        models.build(nothing, "", 8)


def test_what_is_gone_is_refused(monkeypatch):
    from megatron.bridge.training import callbacks

    monkeypatch.delattr(callbacks.Callback, "on_train_end")
    sentence = r"callbacks\.Callback\.on_train_end does not exist in Megatron"
    with pytest.raises(ValueError, match=sentence):
        functions.check("trainer")


# What the doctor shows


def test_the_doctor_shows_every_function(monkeypatch, capsys):
    rows = json.dumps(doctor.function_rows("scoring"))
    monkeypatch.setattr(doctor, "_run", lambda command: f"Megatron says things\n{rows}\n")
    doctor.main(Namespace(functions="scoring"))
    header, *shown = capsys.readouterr().out.splitlines()
    assert header.split() == ["function", "use", "roads", "tested", "installed"]
    assert len(shown) == len(functions.for_road("scoring"))
    (line,) = (line for line in shown if "get_model_config" in line)
    assert line.split() == [
        *("megatron.core.utils:get_model_config", "called", "scoring", "(model)", "(model)")
    ]
    assert not any("NO:" in line for line in shown)


@pytest.mark.slow
def test_the_doctor_looks_in_a_process_of_its_own(capsys):
    doctor.main(Namespace(functions="all"))
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(FUNCTIONS)


def test_the_doctor_says_no_with_the_sentence(monkeypatch):
    def fails(command: object) -> str:
        raise RuntimeError("ValueError: megatron.core.utils.f takes (b, a): expected (a, b)")

    monkeypatch.setattr(doctor, "_run", fails)
    (finding,) = (check for check in doctor.findings() if check.name == "megatron functions")
    assert finding.fine is False
    assert finding.result.endswith("megatron.core.utils.f takes (b, a): expected (a, b)")


# What changed between versions


def test_experts_are_numbered_where_their_name_is_known(monkeypatch):
    from megatron.bridge.models.conversion import model_bridge

    from nemo_rod.cpu.plain import conversion

    def of_bridge_03(name: str) -> bool:
        return ".mlp.experts.linear_fc" in name

    def of_bridge_05(name: str) -> bool:
        return ".experts.local_experts." in name or ".experts.linear_fc" in name

    for function, numbered in ((of_bridge_03, False), (of_bridge_05, True)):
        monkeypatch.setattr(model_bridge, "_megatron_local_name_to_global", function)
        assert conversion._numbered_by_bridge(model_bridge) is numbered


def test_the_weight_of_an_expert_is_found_whether_or_not_it_is_a_module_of_its_own(monkeypatch):
    import torch
    from megatron.bridge.models.conversion import mapping_registry, model_bridge, param_mapping

    from nemo_rod.cpu.plain import conversion

    registry = mapping_registry.MegatronMappingRegistry
    for module, name in (
        (registry, "megatron_to_hf_lookup"),
        (model_bridge, "_megatron_local_name_to_global"),
        (param_mapping, "get_module_and_param_from_name"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    conversion.convert_experts_as_modules.__wrapped__()
    alone, together = torch.nn.Linear(2, 3), torch.nn.Module()
    together.weight0, together.weight1 = (torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(2))
    find = param_mapping.get_module_and_param_from_name
    assert find(alone, "mlp.experts.linear_fc1.weight0")[1] is alone.weight
    assert find(together, "mlp.experts.linear_fc1.weight1")[1] is together.weight1
    listed = registry(param_mapping.AutoMapping("experts.linear_fc2.weight*", "experts.*.down"))
    own_module = listed.megatron_to_hf_lookup("experts.local_experts.3.linear_fc2.weight")
    assert own_module.hf_param == "experts.3.down"


def test_a_signal_handler_is_entered_once():
    from megatron.bridge.training.utils.sig_utils import DistributedSignalHandler

    from nemo_rod.megatron.train_job import _SignalHandler

    before = signal.getsignal(signal.SIGUSR1)
    handler = DistributedSignalHandler(signal.SIGUSR1)
    context: Any = SimpleNamespace(state=SimpleNamespace(signal_handler=handler))
    for enter_first in (False, True):
        handler = context.state.signal_handler = DistributedSignalHandler(signal.SIGUSR1)
        if enter_first:
            handler.__enter__()
        _SignalHandler().on_train_start(context)
        assert signal.getsignal(signal.SIGUSR1) is not before
        _SignalHandler().on_train_end(context)
        assert signal.getsignal(signal.SIGUSR1) is before


def test_checkpoints_are_written_without_fork(tmp_path, monkeypatch):
    """A rank has threads, and a fork of it may wait for ever for a lock that one of them held."""
    train_job: Any = importlib.import_module("nemo_rod.megatron.train_job")
    module: Any = train_job.filesystem_async
    monkeypatch.setattr(module, "mp", getattr(module, "mp", None))  # put back afterwards
    monkeypatch.setattr(module, "_results_queue", None)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork"))
    train_job._write_checkpoints_in_this_process()
    writer, results = module.FileSystemWriterAsync, queue.Queue()
    (name,) = [n for n in dir(writer) if n.startswith("write_preloaded_data_multi")]
    buckets = [(tmp_path / key, key, ([], [])) for key in ("one", "other")]
    getattr(writer, name)([], False, 0, buckets, results)
    assert results.get_nowait() == {0: [], 1: []}
    assert {path.name for path in tmp_path.iterdir()} == {"one", "other"}


def test_settings_and_counters_are_found_by_their_names():
    config = SimpleNamespace(enable_cuda_graph=True, external_cuda_graph=False)
    assert changes.old_cuda_graph_flags(config) == ["enable_cuda_graph"]
    assert changes.old_cuda_graph_flags(SimpleNamespace()) == []
    assert changes.operation_counters(SimpleNamespace(_flops_sum=3, step=1)) == {"_flops_sum": 3}


def test_a_package_that_another_does_not_ask_for_is_named_with_its_cure(tmp_path, monkeypatch):
    for name, asks in (("bridged", "Requires-Dist: class-of-models<=5.12.1,>=5.8"),
                       ("class_of_models", "")):  # fmt: skip
        folder = tmp_path / f"{name}-5.24.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 5.24.0\n{asks}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert clash("bridged", "class-of-models") == (
        "bridged 5.24.0 asks for class-of-models<=5.12.1,>=5.8, and 5.24.0 is installed: "
        "pip install 'class-of-models<=5.12.1,>=5.8'"
    )
    assert clash("bridged", "numpy") == clash("nowhere", "numpy") == ""
