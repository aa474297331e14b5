"""Conversion by Megatron-Bridge of experts that are modules of their own."""

from __future__ import annotations

import functools
import re
from typing import Any

from nemo_rod.upstream import changes, functions


@functools.cache
def convert_experts_as_modules() -> None:
    """Makes versions of Megatron-Bridge that cannot convert experts as separate modules do so.

    Without TransformerEngine, experts are separate modules.

    Raises:
        ValueError: a function that names or looks up experts differs from the tested version.
    """
    functions.check("plain/megatron_bridge")
    if changes.experts_are_numbered_by_bridge():
        return
    from megatron.bridge.models.conversion import model_bridge, param_mapping

    to_global = model_bridge._megatron_local_name_to_global
    model_bridge._megatron_local_name_to_global = _numbered_over_all_ranks(to_global)
    look_up = param_mapping.get_module_and_param_from_name
    param_mapping.get_module_and_param_from_name = _without_number(look_up)


def _numbered_over_all_ranks(to_global: Any) -> Any:
    """Returns `to_global` with experts numbered over all ranks.

    Unpatched, every rank would silently load the weights of the first rank's experts, and none
    could be exported.
    """
    own_module = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d\.\w+)")

    @functools.wraps(to_global)
    def name(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        return to_global(models, config, own_module.sub(r"experts.\2\1", param_name), vp_stage)

    return name


def _without_number(look_up: Any) -> Any:
    """Returns `look_up` with the expert's number dropped where a module has only one expert.

    Unpatched, experts that are published in one tensor could not be loaded: Megatron-Bridge looks
    up their weights by number.
    """

    @functools.wraps(look_up)
    def without_number(models: Any, param_name: str, vp_stage: int | None = None) -> Any:
        last = param_name.rpartition(".")[2]
        if last.startswith("weight") and not hasattr(models, last):
            param_name = param_name.rstrip("0123456789")
        return look_up(models, param_name, vp_stage)

    return without_number
