"""Installs the selector into jobs that it must refuse; prints the messages as a JSON object."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nemo_rod.megatron

sys.path.insert(0, sys.argv[1])  # the recipe
ROLES = {"data/new": "adaptation", "data/old": "replay"}


def setting(key: str, value: Any) -> Callable[[Any], None]:
    def change(cfg: Any) -> None:
        *path, last = key.split(".")
        for part in path:
            cfg = getattr(cfg, part)
        setattr(cfg, last, value)

    return change


def several(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda cfg: [change(cfg) for change in changes]


# name -> what is changed in a job that is accepted, or other options of `install`
JOBS: dict[str, Any] = {
    "accepted": {}, "cuda graphs": setting("model.cuda_graph_impl", "local"),
    "megatron fsdp": setting("dist.use_megatron_fsdp", True),
    "ddp fsdp": setting("ddp.use_megatron_fsdp", True),
    "torch fsdp": setting("dist.use_torch_fsdp2", True),
    "packed": setting("dataset.dataloader_type", "batch"),
    "document masking": setting("dataset.inter_document_masking", True),
    "external": setting("dataset.dataloader_type", "external"),
    "forced balancing": setting("model.moe_router_force_load_balancing", True),
    "delayed fp8": several(setting("model.fp8", "hybrid"), setting("model.fp8_recipe", "delayed")),
    "cyclic": setting("dataset.dataloader_type", "cyclic"),
    "virtual stages": setting("model.virtual_pipeline_model_parallel_size", 2),
    "offloading": setting("model.fine_grained_activation_offloading", True),
    "rampup": setting("train.rampup_batch_size", [8, 8, 100]),
    "smaller batches": setting("train.decrease_batch_size_if_needed", True),
    "skipping": setting("train.iterations_to_skip", [3]),
    "no blend": setting("dataset.blend", None), "no role": {"roles": {"data/new": "adaptation"}},
    "half a multiplier": {"multiplier": 0.5},
    "no references": {"policy": nemo_rod.Joint(), "multiplier": 2},
    "missing references": {"policy": nemo_rod.Joint(), "references": ["nowhere"], "multiplier": 2},
    "drawn for nothing": {"multiplier": 2}, "no host": {"host": "megatron"},
}  # fmt: skip


def main() -> None:
    from before import make_config
    from megatron.bridge.data import loaders
    from megatron.bridge.training import config, setup, train

    from nemo_rod.hosts import swap_in
    from nemo_rod.hosts.swap_in.job_references import HostReferenceJob

    messages: dict[str, str] = {}

    def job() -> Any:
        return make_config(Path("data"), Path("out"), ["new", "old"])

    def install(name: str, cfg: Any, host: str = "megatron_bridge", **options: Any) -> None:
        options = {"roles": ROLES, "policy": nemo_rod.TakeAll(), "multiplier": 1, **options}
        before = train.train_step
        try:
            with nemo_rod.install(host, cfg, **options):
                messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
        assert train.train_step is before, "a refusal must leave the trainer as it was"

    for name, change in JOBS.items():
        cfg = job()
        if callable(change):
            change(cfg)
            install(name, cfg)
        else:
            install(name, cfg, **change)
    with nemo_rod.install(
        "megatron_bridge", job(), roles=ROLES, policy=nemo_rod.TakeAll(), multiplier=1
    ):
        install("twice", job())
    before, loaders.get_train_valid_test_num_samples = (
        loaders.get_train_valid_test_num_samples,
        lambda configuration: None,
    )
    install("other version", job())
    loaders.get_train_valid_test_num_samples = before

    def build(*_: Any) -> None:
        raise ValueError("a model was built")

    setup.setup = build
    adapters = Path(tempfile.mkdtemp())
    (adapters / "iter_0000005").mkdir()
    (adapters / "iter_0000005" / "run_config.yaml").write_text("peft: {dim: 8}\n")
    shares = setting("ddp.reuse_grad_buf_for_mxfp8_param_ag", True)
    for name, changes in (
        ("references", (several(), several())),
        ("references of adapters", (setting("peft", object()), several())),
        ("references by adapters", (several(), several())),
        ("references with shared buffers", (shares, several())),
        ("references with buffers shared later", (several(), shares)),
    ):
        cfg = job()
        changes[0](cfg)
        config.runtime_config_update = changes[1]
        folder = str(adapters) if name == "references by adapters" else "specialist"
        HostReferenceJob.model_folder = lambda *_, folder=folder, **__: folder
        try:
            swap_in.reference("megatron_bridge", cfg, None, role="replay", roles=ROLES, out="out")
        except ValueError as error:
            messages[name] = str(error)
    print("SAID " + json.dumps(messages))


if __name__ == "__main__":
    main()
