"""Names of experts for Megatron-Bridge's conversion if each expert is a separate module."""

from __future__ import annotations

import functools
import re
from typing import Any

from nemo_rod.upstream import changes, functions


@functools.cache
def name_experts_globally() -> None:
    """Numbers the experts of an expert-parallel rank over all ranks, if Bridge does not.

    Without TransformerEngine experts are separate modules. Unpatched, every rank would silently
    load the weights of the first rank's experts, and none could be exported; those that are
    published in one tensor could not be loaded.

    Raises:
        ValueError: the function that names experts differs from the tested version.
    """
    functions.check("plain/megatron_bridge")
    if changes.experts_are_numbered_by_bridge():
        return
    from megatron.bridge.models.conversion import model_bridge, param_mapping

    to_global = model_bridge._megatron_local_name_to_global
    own_module = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d\.\w+)")

    @functools.wraps(to_global)
    def name(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        return to_global(models, config, own_module.sub(r"experts.\2\1", param_name), vp_stage)

    model_bridge._megatron_local_name_to_global = name

    find = param_mapping.get_module_and_param_from_name

    @functools.wraps(find)
    def of_one_expert(models: Any, param_name: str, vp_stage: int | None = None) -> Any:
        last = param_name.rpartition(".")[2]
        if last.startswith("weight") and not hasattr(models, last):
            param_name = param_name.rstrip("0123456789")
        return find(models, param_name, vp_stage)

    param_mapping.get_module_and_param_from_name = of_one_expert
