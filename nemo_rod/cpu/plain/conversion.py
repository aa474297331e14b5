"""Conversion by Megatron-Bridge of experts that are modules of their own."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from nemo_rod.upstream import functions


@functools.cache
def convert_experts_as_modules() -> None:
    """Makes versions of Megatron-Bridge that cannot convert experts as separate modules do so.

    Without TransformerEngine, experts are separate modules.

    Raises:
        ValueError: a function that names or looks up experts differs from the tested version.
    """
    functions.check("plain/megatron_bridge")
    from megatron.bridge.models.conversion import mapping_registry, model_bridge, param_mapping

    registry = mapping_registry.MegatronMappingRegistry
    registry.megatron_to_hf_lookup = _in_either_layout(registry.megatron_to_hf_lookup)
    look_up = param_mapping.get_module_and_param_from_name
    param_mapping.get_module_and_param_from_name = _without_number(look_up)
    if not _numbered_by_bridge(model_bridge):
        to_global = model_bridge._megatron_local_name_to_global
        model_bridge._megatron_local_name_to_global = _numbered_over_all_ranks(to_global)


def _numbered_by_bridge(model_bridge: Any) -> bool:
    """Returns whether Bridge numbers experts that are separate modules over all ranks (since 0.5).

    It always did so for experts in TransformerEngine's layout.
    """
    constants = inspect.unwrap(model_bridge._megatron_local_name_to_global).__code__.co_consts
    return any("local_experts" in text for text in constants if isinstance(text, str))


def _numbered_at_the_end(parameter: str) -> str:
    """Returns the name of an expert's parameter in TransformerEngine's layout."""
    own_module = r"experts\.local_experts\.(\d+)\.(linear_fc\d\.\w+)"
    return re.sub(own_module, r"experts.\2\1", parameter)


def _in_either_layout(find: Any) -> Any:
    """Returns `find`, also for models whose experts Bridge only lists in the other layout."""

    @functools.wraps(find)
    def find_in_either(registry: Any, megatron_param_name: str) -> Any:
        mapping = find(registry, megatron_param_name)
        return mapping or find(registry, _numbered_at_the_end(megatron_param_name))

    return find_in_either


def _numbered_over_all_ranks(to_global: Any) -> Any:
    """Returns `to_global` with experts numbered over all ranks.

    Unpatched, every rank would load the weights of the first rank's experts, and none
    could be exported.
    """

    @functools.wraps(to_global)
    def name(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        return to_global(models, config, _numbered_at_the_end(param_name), vp_stage)

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
