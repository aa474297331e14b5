"""The parts of a swapped-in selector that need no job: roles, names, and the pool's order."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from places import ROOT, Later

from nemo_rod.hosts.swap_in.roles import assign_roles, check_roles, name_sources
from nemo_rod.selection import ReferenceManifest, ReferenceWriter, SourceRow, TakeAll
from nemo_rod.selection.held_out import is_due, over_sources

jobs, job_data = Later("nemo_rod.hosts.swap_in.job"), Later("nemo_rod.hosts.swap_in.job_data")
references = Later("nemo_rod.hosts.swap_in.job_references")
scoring_pass = Later("nemo_rod.megatron.scoring.scoring_pass")
# importing Megatron warns of what a machine without CUDA lacks
pytestmark = pytest.mark.filterwarnings("ignore")
PATHS = ["/data/legal/a_text_document", "/data/legal/old/b_text_document", "/data/web"]


def test_saving_in_the_background_is_refused_on_a_cpu():
    from nemo_rod import cpu

    cpu.prepare()
    from megatron.bridge.training import setup

    from nemo_rod.cpu import trainers

    if torch.cuda.is_available():
        pytest.skip("there it works")
    trainers.install_megatron_bridge()
    cfg: Any = SimpleNamespace(checkpoint=SimpleNamespace(async_save=True))
    with pytest.raises(
        ValueError, match=r"async_save=True hangs on a machine without a GPU: leave"
    ):
        setup.initialize_megatron(cfg=cfg, restart_store=None)


A, R = "adaptation", "replay"
TRAIN = ["/data/new/t", "/data/old/t"]


@pytest.mark.parametrize(
    ("train", "roles", "split", "expected"),
    [
        (PATHS, {"/data/legal": A, "/data/legal/old": R, "/data/web": R}, PATHS, [A, R, R]),
        (PATHS, {Path("/data/legal"): A, Path("/data"): R}, PATHS, [A, A, R]),
        # numbers go before paths, and are places in the blend of the train split
        (PATHS, {0: R, "/data": A}, PATHS, [R, A, A]),
        (PATHS, {0: R, "/data": A}, PATHS[::-1], [A, A, R]),
        (TRAIN, {0: A, 1: R}, ["/held/old/t", "/held/new/t"], [R, A]),
        (TRAIN, {0: A, 1: R}, ["/held/b", "/held/a"], r"/held/b \(number 0 .*: add its path"),
        (TRAIN, {0: A, 1: R, "/held": R}, ["/held/b", "/held/a"], [R, R]),
        (["/a/1", "/b/2"], {0: A, 1: R}, ["/held/b/1", "/held/a/2"], r"/held/b/1 .*: add its path"),
        (TRAIN[:1], {0: A}, ["/held/old/t"], "/held/old/t"),  # a name in common tells nothing
        # a key of another split's source is used, and one of no split's refused
        (TRAIN, {"/data/new": A, "/data/old": R, "/held": R}, ["/held/a"], [R]),
        (TRAIN, {"/data/new": A, "/data/old": R}, ["/held/a"], "/held/a"),
        (PATHS, {"/data/legal": A}, PATHS, r"/data/web \(number 2 of its blend\)"),
        # a name that only begins alike is not a folder above
        (PATHS, {"/data/legal": A, "/data/legal/old": R, "/data/we": R}, PATHS, "'/data/we'"),
        (PATHS, {"/data": A, "/other": R}, PATHS, "'/other'.*no source"),
        (PATHS, {"/data": A, 3: R}, PATHS, r"roles\[3\].*no source"),
        (PATHS, {True: A, False: R}, PATHS, r"roles\['False'\].*no source"),
        (PATHS, {"/data": "new"}, PATHS, "'new': expected 'adaptation' or 'replay'"),
        (PATHS, ["/data"], PATHS, r"roles is \['/data'\]: expected a role by path"),
        (["/data/\udcff"], {0: A}, [], "/data/.*, whose name is not UTF-8"),
    ],
)
def test_roles_of_a_split_or_why_they_do_not_fit(train, roles, split, expected):
    refusal = pytest.raises(ValueError, match=expected) if isinstance(expected, str) else None
    with refusal or nullcontext():
        keys = check_roles(roles, [train, split])
        assert assign_roles(split, keys, train=train) == expected


def test_a_policy_that_a_resumed_job_could_not_recognise_is_refused():
    policy: Any = type("Newest", (), {"needs": frozenset(), "select": print})()
    with pytest.raises(ValueError, match=r"^Newest has no __repr__, .*: make it a dataclass"):
        jobs.SelectingJob(roles={}, multiplier=1, policy=policy)
    with pytest.raises(ValueError, match=r"on_nonfinite='skip' is not valid: expected 'refuse' or"):
        jobs.SelectingJob(roles={}, multiplier=1, policy=TakeAll(), on_nonfinite="skip")


@pytest.mark.parametrize(
    ("dtype", "low", "name"),
    [
        (torch.float32, {}, "fp32"),
        (torch.bfloat16, {"fp8": None}, "bf16"),
        (torch.bfloat16, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8 over bf16"),
        (torch.bfloat16, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8 over bf16"),
        (torch.bfloat16, {"fp4": "e2m1", "fp4_recipe": "nvfp4"}, "fp4 nvfp4 over bf16"),
    ],
)
def test_precisions_have_the_names_of_recipes(dtype, low, name):
    chunk = SimpleNamespace(config=SimpleNamespace(params_dtype=dtype, **low))
    assert jobs.precision_of([chunk]) == name


LOSS, MASK = torch.ones(2, 8), torch.ones(2, 8)
BINDS_MASK = partial(sum, MASK)


@pytest.mark.parametrize(
    ("output", "bound", "works"),
    [
        (LOSS, BINDS_MASK, True),
        ((LOSS, MASK), BINDS_MASK, True),  # of models with images
        (LOSS, partial(sum, MASK.view(-1), 0.5), True),
        (LOSS, partial(sum, torch.tensor(0.5), MASK), False),  # the mask is not the first
        (LOSS, partial(sum, 0.5, MASK), False),
        # other tensors of its size: labels, and one in Megatron's own order of sequences
        (LOSS, partial(sum, torch.arange(16).view(2, 8), MASK), False),
        (LOSS, partial(sum, torch.full((2, 8), -100), MASK), False),
        (LOSS, partial(sum, MASK.T), False),
        (LOSS, partial(sum, MASK.bool()), True),
        (LOSS, partial(sum, MASK.long()), True),
        (LOSS, partial(sum, MASK * 0), True),
        (LOSS, partial(sum, MASK * 1.5), True),
        (LOSS, partial(sum, start=MASK), False),
        (LOSS, sum, False),
        # not logits, nor the mean; between pipeline stages it may return whatever it passes on
        (torch.ones(2, 8, 5), BINDS_MASK, False),
        (torch.tensor(0.5), BINDS_MASK, False),
        (torch.ones(2), BINDS_MASK, False),
    ],
)
def test_a_forward_step_binds_the_mask_first_and_returns_a_loss_for_every_token(
    output, bound, works
):
    step = job_data.losses_and_mask(lambda batches, chunk: (output, bound))
    if bound is BINDS_MASK:
        step(None, SimpleNamespace(post_process=False))
    last = SimpleNamespace(post_process=True)
    if works:
        loss, mask = step(None, last)
        sums = scoring_pass.loss_sums(mask, loss)
        assert sums[:, 0, 0].equal(mask.view(LOSS.shape).sum(1).double())
        return
    for other in (step, job_data.losses_and_mask(lambda batches, chunk: output)):
        sentence = r"does not return functools\.partial\(loss, loss_mask.* a loss for every token"
        with pytest.raises(ValueError, match=sentence):
            other(None, last)


def test_sources_are_named_by_what_tells_them_apart():
    assert name_sources(["/a/legal", "/b/web"]) == ["legal", "web"]
    for folder in ("/a", "/moved/to"):
        paths = [f"{folder}/legal/text", f"{folder}/web/text"]
        assert name_sources(paths) == ["legal/text", "web/text"]
    with pytest.raises(ValueError, match="twice"):
        name_sources(["/a/legal", "/a/legal"])


class Numbers:
    """Job data in which the sample with id i, at place i, has the one token i."""

    def pool(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(start, start + count), np.zeros(count, dtype=bool)

    def micro_batches(self, ids: np.ndarray, size: int) -> Iterator[dict[str, torch.Tensor]]:
        return ({"tokens": torch.from_numpy(row)} for row in ids.reshape(-1, size))


class Samples(list):
    """A dataset like megatron-core's, which counts its reads."""

    dataset_path = "/data/web"
    config = SimpleNamespace(
        sequence_length=3, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, add_extra_token_to_sequence=True,
        tokenizer=SimpleNamespace(vocab_size=9),
    )  # fmt: skip
    dataset = SimpleNamespace(sequence_lengths=np.array([9]))
    unique_identifiers: Mapping[str, str] = {}
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        tokens = torch.tensor(super().__getitem__(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def test_winners_are_read_once_and_compared_with_what_was_scored(tmp_path):
    samples = Samples([[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 0, 1], [1, 1, 1, 1]])
    data = job_data.JobData(samples, {0: "replay"}, num_samples=4)
    manifest = ReferenceManifest(
        model="m", tokenizer=data.tokenizer_fingerprint, store=data.digest, block_size=3,
        lengths=(3,), start=0, stop=4, precision="fp32",
    )  # fmt: skip
    writer = ReferenceWriter(tmp_path, manifest, data.hashes)
    writer.append(range(4), np.ones((4, 1), np.float32))
    writer.close()
    references = job_data.JobReferences.open([tmp_path], data)
    data.compare = references.checked_losses
    checked_batches = partial(data.micro_batches, checked=True)
    samples.reads = 0
    first, second = checked_batches(np.array([2, 0, 1, 3]), 2)
    assert samples.reads == 4  # was 8
    assert first["tokens"].tolist() == [[7, 8, 0], [1, 2, 3]]
    assert second["labels"].tolist() == [[5, 6, 7], [1, 1, 1]]
    samples[1] = [4, 5, 6, 0]
    with pytest.raises(ValueError, match="block 1's hash does not match"):
        list(checked_batches(np.array([0, 1]), 1))


@pytest.mark.parametrize("consumed", [0, 24])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("sampler", ["single", "cyclic", "short"])
def test_an_iterator_that_reads_in_another_order_is_refused(sampler, replicas, consumed):
    """Of Megatron-Bridge's own samplers, the sequential one reads sample after sample."""
    from megatron.bridge.data import samplers

    total, size, count = (consumed + 2 if sampler == "short" else 96), 2, 3
    kind, options = samplers.MegatronPretrainingSampler, dict[str, Any](drop_last=False)
    if sampler == "cyclic":
        kind = samplers.MegatronPretrainingRandomSampler
        options = {"data_sharding": True, "dataset": range(total)}
    refusal = pytest.raises(ValueError, match=f"read samples {consumed} and .*'single'")
    for replica in range(replicas):
        own = kind(
            total_samples=total, consumed_samples=consumed, micro_batch_size=size,
            data_parallel_rank=replica, data_parallel_size=replicas, **options,
        )  # fmt: skip
        iterator = ({"tokens": torch.tensor(ids)} for ids in own)
        group = SimpleNamespace(size=lambda: replicas, rank=lambda replica=replica: replica)
        with nullcontext() if sampler == "single" else refusal:
            job_data.refuse_other_order(Numbers(), iterator, consumed, count, size, group)


def test_a_validation_split_without_samples_is_refused_if_it_was_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("nemo_rod.hosts.swap_in.job.is_recorder", lambda: True)
    other = Samples([[1, 2, 3, 4]])
    other.dataset_path = "/data/other"  # type: ignore[misc]
    for valid, reason in (
        (None, "the job has no validation split"),
        (Samples([]), "the job's validation split has no sample"),
        (other, "The job reads /data/other .*"),
    ):
        for asked in (3, None, 0):
            options: Any = {"roles": {"/data/web": "replay"}, "validation_every": asked}
            job = jobs.SelectingJob(**options, multiplier=1, policy=TakeAll())
            facts = jobs.Facts(batch_size=1, seed=0, steps=2, every=None, checkpoints=None)
            sentence = f"No held-out losses can be measured: {reason}; give the job a validation "
            with pytest.raises(ValueError, match=sentence) if asked else nullcontext():
                job.take_data(Samples([[1, 2, 3, 4], [4, 5, 6, 7]]), valid, 2, facts)
            assert bool(capsys.readouterr().err) == (asked is None)
            assert job.held_out is None
    with pytest.raises(ValueError, match=r"validation_every=-1 is not valid: expected a number"):
        jobs.SelectingJob(roles={}, multiplier=1, policy=TakeAll(), validation_every=-1)


def test_several_validation_sets_are_one_split():
    """Of any kinds, with a source in two of them; and a split of its own if nobody built it."""
    old, new, other = (Samples([[1, 2, 3, 4]] * count) for count in (1, 2, 3))
    for part, path in ((old, "/data/old/t"), (new, "/held/new/t"), (other, "/data/old/t")):
        part.dataset_path = path  # type: ignore[misc]
    blend = SimpleNamespace(datasets=[old, new])
    held_out = job_data.HeldOut(
        [blend, None, other], {"/data": R, "/held": A}, unused=(), train=["/data/old/t"]
    )
    assert [(row.name, row.role, row.count) for row in held_out.measured] == [
        ("new/t", A, 2), ("old/t", R, 3)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="the job has no validation split"):
        job_data.HeldOut([None], {"/data": R}, unused=())


@pytest.mark.parametrize("kind", ["select", "reference"])
def test_data_that_ends_before_the_steps_is_refused_when_it_is_built(kind):
    data: dict[str, Any] = {"roles": {"/data/web": R}, "multiplier": 1}
    facts = jobs.Facts(batch_size=2, seed=0, steps=2, every=None, checkpoints=None)
    job = (
        jobs.SelectingJob(**data, policy=TakeAll(), validation_every=0)
        if kind == "select"
        else references.HostReferenceJob(**data, role=R, out="nowhere")
    )
    job.take_data(Samples([[1, 2, 3, 4]] * 4), None, 4, facts)
    with pytest.raises(ValueError, match=r"ends after 3 samples, but its steps draw 4: give its b"):
        job.take_data(Samples([[1, 2, 3, 4]] * 3), None, 4, facts)


def test_sources_that_are_not_trained_on_are_forgotten_alike():
    names = [f"validation/replay/{name}/loss" for name in "ab"]
    start, now = (dict(zip(names, losses, strict=True)) for losses in ((1.0, 2.0), (1.5, 2.1)))
    new, *old = (SourceRow("new", A, 0, 9), SourceRow("a", R, 9, 3), SourceRow("b", R, 12, 1))
    for sources, expected in (([new], 0.3), ([new, *old], 0.4), ([new, old[0]], 0.3)):
        row = over_sources(now, start, sources)
        assert row == pytest.approx({"validation/forgetting": expected})


def test_held_out_losses_are_due_at_intervals_and_at_the_end():
    for every, due in ((3, [3, 6, 7]), (0, [7]), (None, [7])):
        assert [done for done in range(1, 8) if is_due(done, every=every, steps=7)] == due


def test_held_out_samples_are_known_by_their_content():
    one, other = (
        job_data.HeldOut(Samples([[1, 2, 3, 4], last]), {0: "replay"}, unused=()).content()
        for last in ([4, 5, 6, 7], [4, 5, 6, 0])
    )
    assert one != other


def test_hosts_without_megatron_bridge_import_none_of_it():
    """Neither themselves nor by what they import at the top of a module."""
    roots = "nemo_rod.hosts.megatron_lm", "nemo_rod.hosts.swap_in.job_references"
    imported, waiting = set(), [*roots]
    while waiting:
        module = waiting.pop()
        file = ROOT / f"{module.replace('.', '/')}.py"
        if module in imported or not module.startswith("nemo_rod.") or not file.exists():
            continue
        imported.add(module)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("megatron.bridge"), module
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                waiting += [str(node.module), *names]
    assert "nemo_rod.megatron.rod_selector" in imported


def test_a_script_runs_with_the_megatron_core_beside_it(tmp_path, monkeypatch):
    from nemo_rod.cpu.on_cpu import _prefer_megatron_of

    restarts: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: restarts.append(arguments))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "code")
    _prefer_megatron_of(tmp_path)  # no megatron-core there
    assert sys.path[0] == str(tmp_path) and not restarts
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    _prefer_megatron_of(tmp_path)
    assert restarts == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}code"
    with pytest.raises(ValueError, match=r"was imported instead of.*run the script from another"):
        _prefer_megatron_of(tmp_path)


PROGRAM = """
import os, signal
import nemo_rod.megatron
from nemo_rod.hosts.save_helpers import end_with_rank
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
import psutil

if __name__ == "__main__":
    end_with_rank()
    make = getattr(filesystem_async, "get_write_results_queue", None)
    results = (make or filesystem_async._get_write_results_queue)()
    results.put(1)
    assert results.get() == 1
    async_utils.PersistentAsyncCaller._get_process(0)
    helpers = psutil.Process().children()
    print(*(helper.pid for helper in helpers if "resource_tracker" not in str(helper.cmdline())))
    os.sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_helpers_end_with_a_killed_rank(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=250)
    queue, writer = map(int, done.stdout.split())
    end = time.monotonic() + 20
    while time.monotonic() < end and (psutil.pid_exists(queue) or psutil.pid_exists(writer)):
        time.sleep(0.1)
    assert not psutil.pid_exists(queue) and not psutil.pid_exists(writer)
