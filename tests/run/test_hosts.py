"""Every key of every variant reaches the job, and NeMo-RL's workers too, or is refused by name."""

import copy
import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from command_line import composed

from nemo_rod.config import Cluster, Config, Optimisation, Parallel, Scoring, Selection, Variant
from nemo_rod.hosts.nemo_rl.settings import of_job
from nemo_rod.jobs import EvaluateJob, Job, ReferenceJob, TrainJob
from nemo_rod.run.checks import check
from nemo_rod.run.model_jobs import ModelJobs
from nemo_rod.run.run_folder import RunFolder

BLOCKS = {"num_adaptation": 900, "num_replay": 3000, "digest": "d"}
NOT_ON_NEMO_RL = {"converge", "train.terms"}
# Keys that only say something together with another: the rest of such a variant.
TOGETHER: dict[str, dict[str, Any]] = {
    "adaptation": {"share": 0.3},
    "replay": {"share": 0.3},
    "follow_by": {"follow": "rod"},
    "train.optimizer_offload": {"train": {"precision_aware_optimizer": True}},
}
VALUES: dict[str, Any] = {
    "train.steps": 100, "train.batch_size": 64, "train.micro_batch_size": 4, "train.lr": 1e-5,
    "train.min_lr_ratio": 0.2, "train.warmup_fraction": 0.1, "train.decay_fraction": 0.2,
    "train.adam_beta1": 0.8, "train.adam_beta2": 0.9, "train.adam_eps": 1e-6,
    "train.weight_decay": 0.2, "train.clip_grad": 2.0, "train.warmup_steps": 3,
    "train.decay_steps": 4, "train.recompute": "full", "train.grad_reduce": "bf16",
    "train.precision_aware_optimizer": True, "train.optimizer_offload": True,
    "train.terms": {"l2_base": 0.01},
    "selection.multiplier": 4.0, "selection.balance": "expected", "selection.kappa": 0.5,
    "selection.on_nonfinite": "exclude",
    "scoring.micro_batch_size": 8, "scoring.prefix": "1/2",
    "steps": 7, "budget": 0.5, "compute": 0.5, "converge": True, "retention": 0.5,
    "share": 0.3, "adaptation": "rho", "replay": "rho", "follow": "rod", "follow_by": "source",
    "curriculum": "elsewhere", "reference": "elsewhere",
}  # fmt: skip
# not of a training job: what it names is another arm, or read once for a whole run; or a part that
# another package registers (tests/project/test_extending.py)
ELSEWHERE = {
    "scoring.precision", "of", "train", "selection", "scoring",
    "selection.policy", "selection.policy_options", "selection.score",
    "at", "anneal",  # of a branch of another arm (tests/project/test_extending.py)
}  # fmt: skip


def test_every_key_of_a_variant_is_walked():
    sections = {"train": Optimisation, "selection": Selection, "scoring": Scoring}
    keys = {f"{s}.{f.name}" for s, kind in sections.items() for f in dataclasses.fields(kind)}
    keys |= {field.name for field in dataclasses.fields(Variant)}
    assert set(VALUES) == keys - ELSEWHERE


@pytest.mark.parametrize("key", VALUES)
def test_a_key_of_a_variant_reaches_both_hosts(key, tmp_path, monkeypatch):
    of = {"converge": "no_replay", "retention": "fixed_20"}.get(key, "rod")
    variant = {"of": of, **TOGETHER.get(key, {})}
    plain = job_of(variant, tmp_path, monkeypatch)
    section, _, name = key.rpartition(".")
    if section:
        variant[section] = {**variant.get(section, {}), name: VALUES[key]}
    else:
        variant[key] = VALUES[key]
    job = job_of(variant, tmp_path, monkeypatch)
    assert leaves(job) != leaves(plain), f"{key} changes nothing of the job"
    if key in NOT_ON_NEMO_RL:
        with pytest.raises(ValueError, match=r"NeMo-RL|nemo_rl|launcher=local"):
            config_of(variant, "nemo_rl")
    elif section == "train":  # the rest is read from the job itself
        assert of_job(plain) != of_job(job), f"{key} does not reach NeMo-RL"


def test_held_out_losses_need_no_worker_of_nemo_rl(tmp_path, monkeypatch):
    config, ran = config_of({"of": "rod"}, "nemo_rl"), list[str]()
    monkeypatch.setattr("nemo_rod.run.launch.local.run_job", lambda *_, **__: ran.append("here"))
    monkeypatch.setattr("nemo_rod.hosts.nemo_rl.launcher.resolve_job", lambda *_: {})
    monkeypatch.setattr("nemo_rod.hosts.nemo_rl.algorithm.run", lambda *_: ran.append("ray"))
    jobs = ModelJobs(config, RunFolder(tmp_path, "toy"))
    job = partial(jobs.job, name="a job", out=tmp_path)
    jobs.run(job(EvaluateJob, models={"base": "hf"}), tmp_path)
    own: dict[str, Any] = {"role": "replay", "model_digest": "", "lengths": [16]}
    jobs.run(job(ReferenceJob, start="hf", **own), tmp_path)
    assert ran == ["here", "ray"]


def test_a_job_knows_the_gpus_of_its_cluster_and_nothing_else_of_it(tmp_path):
    """Its line of progress has the MFU, and NeMo-RL spreads its processes over the nodes."""
    config = config_of({"of": "rod"})
    gpus: dict[str, Any] = {"gpu": "H100", "gpus_per_node": 1}
    config.cluster, config.parallel = Cluster(**gpus, env={"TOKEN": "secret"}), Parallel(data=2)
    own: dict[str, Any] = {"role": "replay", "model_digest": "", "lengths": [16], "start": "hf"}
    job = ModelJobs(config, RunFolder(tmp_path, "toy")).job(ReferenceJob, "a job", tmp_path, **own)
    assert job.config.cluster == Cluster(**gpus)
    assert of_job(job)["cluster"] == {"gpus_per_node": 1, "num_nodes": 2}


def job_of(variant: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """The job that would train a variant of the toy."""
    config, written = config_of(variant), list[Job]()
    jobs = ModelJobs(config, RunFolder(folder, "toy"))
    monkeypatch.setattr(jobs, "run", lambda job, _: written.append(job))
    # no curriculum here
    monkeypatch.setattr("nemo_rod.selection.arms.Arm.inputs", lambda arm: {})
    used = jobs.references(jobs.settings("mine"))
    jobs.train(folder, folder / "base", jobs.arm("mine", BLOCKS), used)
    (job,) = written
    assert isinstance(job, TrainJob)
    return job


def config_of(variant: dict[str, Any], kind: str = "local") -> Config:
    config = copy.deepcopy(toy())
    config.variants = {**config.variants, "mine": variant}
    config.arm, config.validation.every, config.launcher.kind = "mine", 10, kind
    check(config)
    return config


@cache
def toy() -> Config:
    return composed("recipe=toy", "arms=[rod,no_replay]")


def leaves(job: TrainJob) -> dict[str, Any]:
    """What a job says, but for its digest, made of the rest, and for the variant as given."""
    config = dataclasses.replace(job.config, variants={})
    return dataclasses.asdict(dataclasses.replace(job, config=config, config_digest=""))
