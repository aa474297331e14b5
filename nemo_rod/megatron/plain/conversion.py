"""Names of experts for Megatron-Bridge's conversion, where experts are modules of their own."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any


@functools.cache
def name_experts_globally() -> None:
    """Numbers the experts of an expert-parallel rank; Bridge up to 0.4 does so for TE's alone.

    Without TransformerEngine experts are modules of their own. Left alone, every rank would load
    the weights of the first rank's experts, silently, and none could be exported.
    """
    from megatron.bridge.models.conversion import model_bridge

    to_global = model_bridge._megatron_local_name_to_global
    if "local_experts" in inspect.getsource(to_global):  # it numbers both, since 0.5
        return
    own_module = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d\.\w+)")

    def name(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        return to_global(models, config, own_module.sub(r"experts.\2\1", param_name), vp_stage)

    model_bridge._megatron_local_name_to_global = name
