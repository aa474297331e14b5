"""Merging of Megatron's distributed checkpoints, which Megatron-core itself saved.

The oracle reads whole tensors with torch's own loader and interpolates them with torch.lerp.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, TESTS

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed.checkpoint as dcp  # noqa: E402
from mcore_checkpoints import (  # noqa: E402
    COUNTS,
    EMBEDDING,
    FACTOR,
    LAYERS,
    NORM,
    OUTPUT,
    tensors_of,
)

from nemo_rod import cli  # noqa: E402
from nemo_rod.lab.merging import merge_checkpoints, torch_dist  # noqa: E402

Tensors = dict[str, "torch.Tensor"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of checkpoints, by the names in mcore_checkpoints."""
    root = tmp_path_factory.mktemp("mcore")
    done = subprocess.run(
        [sys.executable, str(TESTS / "oracles" / "mcore_checkpoints.py"), str(root)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def read(weights: Path) -> Tensors:
    """Every tensor of a checkpoint, whole, by torch's loader."""
    described = dcp.FileSystemReader(weights).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(weights), no_dist=True)
    return tensors


def lerp(base: Tensors, adapted: Tensors, lam: float) -> Tensors:
    return {
        name: torch.lerp(tensor.float(), adapted[name].float(), lam).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in base.items()
    }


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("base", "adapted", "dtype"),
    [
        ("base", "adapted", torch.float32),
        ("adapted_thirds", "base", torch.float32),
        ("base_bf16", "adapted_bf16", torch.bfloat16),  # neither's pieces lie within the other's
    ],
)
def test_merges_are_exact_whatever_the_pieces(
    saved: Path, tmp_path: Path, base: str, adapted: str, dtype: torch.dtype, lam: float
) -> None:
    merge_checkpoints(saved / base, saved / adapted, tmp_path / "out", lam)
    seeds = (1, 0) if base == "adapted_thirds" else (0, 1)
    expected = lerp(*(tensors_of(seed, dtype) for seed in seeds), lam)
    assert_equal(read(tmp_path / "out" / "release"), expected)


def test_two_dtypes_give_the_one_that_holds_both(saved: Path, tmp_path: Path) -> None:
    merge_checkpoints(saved / "base_bf16", saved / "adapted", tmp_path / "out", 1.0)
    assert_equal(read(tmp_path / "out" / "release"), tensors_of(1))


def test_what_agrees_stays_bit_equal(saved: Path, tmp_path: Path) -> None:
    merge_checkpoints(saved / "adapted", saved / "adapted_thirds", tmp_path / "out", 0.3)
    assert_equal(read(tmp_path / "out" / "release"), tensors_of(1))


def test_the_output_holds_the_model_alone(saved: Path, tmp_path: Path) -> None:
    iteration = saved / "base" / "iter_0000008"  # one iteration's folder will do
    merge_checkpoints(iteration, saved / "adapted", tmp_path / "out", 0.5)
    out = tmp_path / "out"
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    described = dcp.FileSystemReader(out / "release").read_metadata().state_dict_metadata
    objects = {name.split("/")[0] for name in described if name not in tensors_of(0)}
    assert objects == {
        "decoder.layers.mlp.linear_fc1._extra_state",
        "decoder.layers.mlp.settings",
    }
    common = torch.load(out / "release" / "common.pt", weights_only=False)
    assert {key: common[key] for key in ("checkpoint_version", "iteration")} == {
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    assert common["args"].hidden_size == 4
    assert common["content_metadata"] == {"singleton_local_shards": False}
    assert set(common) == {"args", "checkpoint_version", "iteration", "content_metadata"}
    assert json.loads((out / "release" / "metadata.json").read_text())["sharded_backend"]


def test_no_piece_is_larger_than_what_was_stored(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, list[int]] = {}
    piece = torch_dist.Checkpoint.piece

    def noted(self: Any, name: str, place: Any) -> Any:
        read = piece(self, name, place)
        sizes.setdefault(name, []).append(read.numel())
        return read

    monkeypatch.setattr(torch_dist.Checkpoint, "piece", noted)
    merge_checkpoints(saved / "base", saved / "adapted", tmp_path / "out", 0.5, max_shard_bytes=200)
    assert sizes[LAYERS] == [24] * 4  # a layer at a time, from either side
    files = sorted((tmp_path / "out" / "release").glob("*.distcp"))
    assert len(files) == 5  # embedding, two layers, output with what is small
    assert_equal(read(tmp_path / "out" / "release"), lerp(tensors_of(0), tensors_of(1), 0.5))


def as_bridge(folder: Path, to: Path, vocabulary: int) -> Path:
    """The checkpoint with what Megatron-Bridge writes beside the weights."""
    shutil.copytree(folder, to)
    weights = to / "iter_0000008"
    config = {"model": {"vocab_size": vocabulary}, "checkpoint": {"save_optim": True}}
    (weights / "run_config.yaml").write_text(json.dumps(config))
    torch.save(
        {"step": torch.tensor(8), "do_train": torch.tensor(True)}, weights / "train_state.pt"
    )
    return to


def test_padding_of_the_vocabulary_may_differ(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{EMBEDDING}' has shape \(16, 4\)"):
        merge_checkpoints(saved / "base", saved / "padded", tmp_path / "out", 0.5)
    base = as_bridge(saved / "base", tmp_path / "base", 10)
    padded = as_bridge(saved / "padded", tmp_path / "padded", 10)
    expected = lerp(tensors_of(0), tensors_of(1), 0.5)
    for number, sides in enumerate([(base, padded), (padded, base)]):
        out = tmp_path / f"out_{number}"
        merge_checkpoints(*sides, out, 0.5)
        merged = read(out / "iter_0000000")
        assert merged[EMBEDDING].shape == merged[OUTPUT].shape == (12, 4)
        torch.testing.assert_close(merged, expected)
    counters = torch.load(out / "latest_train_state.pt")
    assert {key: int(value) for key, value in counters.items()} == {"step": 0, "do_train": 0}
    larger = as_bridge(saved / "padded", tmp_path / "larger", 14)
    with pytest.raises(ValueError, match=EMBEDDING):
        merge_checkpoints(base, larger, tmp_path / "out", 0.5)


@pytest.mark.parametrize(
    ("adapted", "words"),
    [
        ("missing", ["missing/iter_0000008 lacks 1 tensor", NORM]),
        ("foreign", ["base/iter_0000008 lacks 1 tensor", "'extra'"]),
        ("shape", [NORM, "(5,)", "(4,)"]),
        ("kind", [NORM, "int64", "float32"]),
        ("counts", [COUNTS, "int64", "differs"]),
        ("quantised", [NORM, "quantised", "float8"]),
        ("low_rank", ["low_rank/iter_0000008", FACTOR, "merge the adapter into its model first"]),
        ("object", ["decoder.layers.mlp.settings", "differs"]),
    ],
)
def test_what_does_not_match_is_refused(
    saved: Path, tmp_path: Path, adapted: str, words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        merge_checkpoints(saved / "base", saved / adapted, tmp_path / "out", 0.5)
    assert all(word in str(error.value) for word in words)
    assert list(tmp_path.iterdir()) == []


def without_file(folder: Path) -> None:
    next(folder.glob("iter_*/*.distcp")).unlink()


def without_arguments(folder: Path) -> None:
    torch.save({"checkpoint_version": 3.0}, folder / "iter_0000008" / "common.pt")


def of_another_format(folder: Path) -> None:
    (folder / "iter_0000008" / "metadata.json").write_text('{"sharded_backend": "zarr"}')


def with_a_foreign_tracker(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("defaults:\n- schema\n" * 40)


def compressed(folder: Path) -> None:
    (folder / "iter_0000008" / "modelopt_state").mkdir()


def of_hugging_face(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_file, r"lacks __0_\d.distcp, which its .metadata names"),
        (without_arguments, "holds neither run_config.yaml nor Megatron-LM's arguments"),
        (of_another_format, "sharded_backend in its metadata.json is zarr"),
        (
            with_a_foreign_tracker,
            "latest_checkpointed_iteration.txt is damaged: expected the number",
        ),
        (compressed, "was compressed by ModelOpt"),
        (of_hugging_face, "adapted is a Megatron checkpoint and .*base is not"),
        (shutil.rmtree, "there is no folder .*base"),
    ],
)
def test_folders_that_cannot_be_merged_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    shutil.copytree(saved / "base", tmp_path / "base")
    change(tmp_path / "base")
    with pytest.raises(ValueError, match=sentence):
        merge_checkpoints(tmp_path / "base", saved / "adapted", tmp_path / "out", 0.5)
    assert {path.name for path in tmp_path.iterdir()} <= {"base"}


def test_a_tensor_with_a_hole_is_refused(saved: Path, tmp_path: Path) -> None:
    import pickle

    shutil.copytree(saved / "adapted", tmp_path / "adapted")
    file = tmp_path / "adapted" / "iter_0000008" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata[LAYERS].chunks[-1]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=f"{LAYERS}' is not whole in .*adapted"):
        merge_checkpoints(saved / "base", tmp_path / "adapted", tmp_path / "out", 0.5)


def test_killed_in_the_middle_it_leaves_nothing_and_can_be_repeated(
    saved: Path, tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:
        piece, calls = torch_dist.Checkpoint.piece, iter(range(5))

        def deadly(self: Any, name: str, place: Any) -> Any:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return piece(self, name, place)

        torch_dist.Checkpoint.piece = deadly
        merge_checkpoints(saved / "base", saved / "adapted", tmp_path / "out", 0.5)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (left_over,) = tmp_path.iterdir()
    assert left_over.name == ".out.partial" and list(left_over.rglob("*.distcp"))
    merge_checkpoints(saved / "base", saved / "adapted", tmp_path / "out", 1.0)
    assert_equal(read(tmp_path / "out" / "release"), tensors_of(1))
    assert not left_over.exists()


def test_the_command_takes_two_folders(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def nemo_rod(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["nemo-rod", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    out = str(tmp_path / "out")
    folders = [str(saved / "base"), str(saved / "adapted"), out]
    assert nemo_rod("merge", *folders, "lambda=0.25") == 0
    assert_equal(read(tmp_path / "out" / "release"), lerp(tensors_of(0), tensors_of(1), 0.25))
    assert capsys.readouterr().out.startswith(f"{out}: 0.75 of {folders[0]} and 0.25 of ")
    for arguments, sentence in (
        (["merge", *folders, "lambda=0.25"], "already holds files"),
        (["merge", *folders, "lambda=half"], "lambda=half is not valid"),
        (["merge", *folders], "expected nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT"),
        (["merge", *folders[:2], "lambda=0.5"], "expected nemo-rod merge BASE ADAPTED OUT"),
        (["merge", *folders[:2], str(tmp_path / "new"), "lambda=2"], "lambda is 2.0"),
    ):
        assert nemo_rod(*arguments) == 2
        assert sentence in capsys.readouterr().err
