"""Reference losses of a job: refused for `ddp` and `precision`, not for `accepted`."""

import sys
from pathlib import Path

from megatron.bridge.training import config, setup

import nemo_rod.megatron  # noqa: F401
from nemo_rod.hosts import swap_in
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob

sys.path.insert(0, sys.argv[1])  # the recipe
from before import make_config


def loads(*_):
    raise RuntimeError("a model was built")


def set_later(cfg):
    cfg.ddp.reuse_grad_buf_for_mxfp8_param_ag = True


setup.setup, HostReferenceJob.model_folder = loads, lambda *_, **__: "specialist"
cfg = make_config(Path("data"), Path("out"), ["new", "old"])
if sys.argv[2] == "ddp":
    set_later(cfg)
config.runtime_config_update = set_later if sys.argv[2] == "precision" else lambda cfg: None
roles = {"data/new": "adaptation", "data/old": "replay"}
try:
    swap_in.reference("megatron_bridge", cfg, None, role="replay", roles=roles, out="out")
except ValueError as error:
    print("SAID", error)
