"""Installs the selector into jobs that it must refuse; prints the messages as a JSON object."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from job_notes import answer, change, say

import nemo_rod.megatron

sys.path.insert(0, sys.argv[1])  # the recipe
ROLES = {"data/new": "adaptation", "data/old": "replay"}


# name -> keys that are changed in a job that is accepted, or `install` with other options
JOBS: dict[str, dict[str, Any]] = {
    "accepted": {},
    "cuda graphs": {"model.cuda_graph_impl": "local"},
    "megatron fsdp": {"dist.use_megatron_fsdp": True},
    "ddp fsdp": {"ddp.use_megatron_fsdp": True},
    "torch fsdp": {"dist.use_torch_fsdp2": True},
    "packed": {"dataset.dataloader_type": "batch"},
    "document masking": {"dataset.inter_document_masking": True},
    "external": {"dataset.dataloader_type": "external"},
    "cyclic": {"dataset.dataloader_type": "cyclic"},
    "rampup": {"train.rampup_batch_size": [8, 8, 100]},
    "smaller batches": {"train.decrease_batch_size_if_needed": True},
    "skipping": {"train.iterations_to_skip": [3]},
    "no blend": {"dataset.blend": None},
    "no role": {"roles": {"data/new": "adaptation"}},
    "half a multiplier": {"multiplier": 0.5},
    "no references": {"policy": nemo_rod.Joint(), "multiplier": 2},
    "missing references": {"policy": nemo_rod.Joint(), "references": ["nowhere"], "multiplier": 2},
    "drawn for nothing": {"multiplier": 2},
    "no host": {"host": "megatron"},
}


def main() -> None:
    from before import make_config
    from megatron.bridge.data import loaders
    from megatron.bridge.training import config, setup, train

    from nemo_rod.hosts import swap_in
    from nemo_rod.hosts.swap_in.job_references import HostReferenceJob

    messages: dict[str, str] = {}

    def job() -> Any:
        return make_config(Path("data"), Path("out"), ["new", "old"])

    def install(cfg: Any, host: str = "megatron_bridge", **options: Any) -> str:
        options = {"roles": ROLES, "policy": nemo_rod.TakeAll(), "multiplier": 1, **options}
        before = train.train_step
        try:
            return answer(lambda: nemo_rod.install(host, cfg, **options).uninstall())
        finally:
            assert train.train_step is before, "a refusal must leave the trainer as it was"

    for name, given in JOBS.items():
        cfg = job()
        for key in [key for key in given if "." in key]:
            change(cfg, key, given[key])
        messages[name] = install(cfg, **{key: given[key] for key in given if "." not in key})
    with nemo_rod.install(
        "megatron_bridge", job(), roles=ROLES, policy=nemo_rod.TakeAll(), multiplier=1
    ):
        messages["twice"] = install(job())
    before, loaders.get_train_valid_test_num_samples = (
        loaders.get_train_valid_test_num_samples,
        lambda configuration: None,
    )
    messages["other version"] = install(job())
    loaders.get_train_valid_test_num_samples = before

    def build(*_: Any) -> None:
        raise ValueError("a model was built")

    setup.setup = build
    made = tempfile.TemporaryDirectory()
    adapters, torn = Path(made.name, "adapters"), Path(made.name, "torn")
    torn.mkdir()
    saved = {name: Path(made.name, name) for name in ("empty", "gone", "state", "torch", "zarr")}
    for name, folder in saved.items():
        (folder / "iter_0000004" / "mp_rank_00").mkdir(parents=True)
        tracker = {"empty": "", "gone": "7", "state": "4"}.get(name, "4\n")
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    (saved["state"] / "latest_train_state.pt").touch()
    backend = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (saved["zarr"] / "iter_0000004" / "metadata.json").write_text(json.dumps(backend))
    (adapters / "iter_0000005").mkdir(parents=True)
    (adapters / "iter_0000005" / "run_config.yaml").write_text("peft: {dim: 8}\n")
    (torn / "run_config.yaml").write_text("peft: {dim: 8\n")
    shares = "ddp.reuse_grad_buf_for_mxfp8_param_ag"
    # name -> a key of the job that is changed, and one that the trainer's own setup changes
    for name, changed, later in (
        ("references", "", ""),
        ("references of adapters", "peft", ""),
        ("references by adapters", "", ""),
        ("references of a damaged configuration", "", ""),
        *((f"references of {name}", "", "") for name in saved),
        ("references with shared buffers", shares, ""),
        ("references with buffers shared later", "", shares),
    ):
        cfg = job()
        if changed:
            change(cfg, changed, True)
        config.runtime_config_update = lambda cfg, key=later: key and change(cfg, key, True)
        folders = {
            "references by adapters": adapters,
            "references of a damaged configuration": torn,
            **{f"references of {name}": folder for name, folder in saved.items()},
        }
        folder = str(folders.get(name, "specialist"))
        HostReferenceJob.model_folder = lambda *_, folder=folder, **__: folder
        options = {"role": "replay", "roles": ROLES, "out": "out"}
        messages[name] = answer(swap_in.reference, "megatron_bridge", cfg, None, **options)
    made.cleanup()  # a fork ends without it
    say(messages)


if __name__ == "__main__":
    main()
