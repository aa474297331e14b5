"""Keys of a config.json that Megatron-Bridge takes no account of.

Each key that is not its class's default is changed, and the model that Bridge describes must change
with it. Some of the keys found may not matter to the model; that of the losses decides.

    python -m nemo_rod.megatron.config_keys FOLDER    # prints them, as JSON
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nemo_rod.checkpoints.published import NOT_COMPUTED
from nemo_rod.megatron import STAND_INS


def left_out(hf: str, trust_remote_code: bool = False, *, is_built: bool = True) -> list[str]:
    """Returns the keys of a checkpoint's config.json that do not change what Bridge describes.

    Of a model that it cannot build, those that choose another way to compute, changed or not.
    """
    from transformers import AutoConfig, GenerationConfig, PretrainedConfig

    config = AutoConfig.from_pretrained(hf, trust_remote_code=trust_remote_code)
    vars(config).pop("auto_map", None)  # see `models.model_provider`
    common = {*PretrainedConfig().to_dict(), *GenerationConfig().to_dict(), "model_type"}
    whole = _bridge_description(config)
    found: list[str] = []
    for place, key, value, other in _settings(config):
        if key in common or NOT_COMPUTED.fullmatch(key):
            continue
        changed: Any = copy.deepcopy(config)
        inner = changed
        for name in place:
            inner = inner[name] if isinstance(inner, dict) else getattr(inner, name)
        if not isinstance(inner, dict):
            setattr(inner, key, other)
        elif other is None and key in ("rope_type", "type"):  # the plain rotation
            inner["rope_type"] = "default"
        else:
            inner[key] = other
        described = _bridge_description(changed)
        chooses = isinstance(value, bool | str | None) or "rope" in "".join(place)
        is_ignored = described == whole and whole is not None
        if is_ignored or (chooses and not is_built) or (whole is None and described is not None):
            found.append(".".join((*place, key)))
    return found


def _bridge_description(config: Any) -> Any:
    """Returns the values of Bridge's description of a model; None where it has none."""
    from megatron.bridge import AutoBridge

    for stand_in in STAND_INS:
        stand_in.prepare_bridge()
    try:
        provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    except Exception:  # bridges raise exceptions of any class
        return None
    return {key: _plain(value) for key, value in vars(provider).items()}


def _plain(value: Any) -> Any:
    """Returns a value in a form that is equal for equal descriptions."""
    if isinstance(value, functools.partial):
        return _plain(value.func), [*map(_plain, value.args)], _plain(value.keywords)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    simple = isinstance(value, str | int | float | bool | type(None))
    return value if simple else re.sub(" at 0x[0-9a-f]+", "", repr(value))


def _settings(config: Any) -> Iterator[tuple[tuple[str, ...], str, Any, Any]]:
    """Yields section, key, value and another value of what is not its class's default."""
    for section in (None, "text_config"):
        inner = config if section is None else getattr(config, section, None)
        if inner is None:
            continue
        place = () if section is None else (section,)
        defaults = type(inner)()
        for key, value in inner.to_dict().items():
            default = getattr(defaults, key, None)
            if key in ("rope_parameters", "rope_scaling"):
                known = default if isinstance(default, dict) else {}
                for name, each in (value or {}).items():
                    if each != known.get(name) and not _is_moot(name, each, value, known):
                        yield (*place, key), name, each, _other(each)
            elif value != default and not isinstance(value, dict):
                others = {name: each for name, each in inner.to_dict().items() if name != key}
                with suppress(Exception):  # the class may need the key
                    if getattr(type(inner).from_dict(others), key, value) == value:
                        continue  # the others say as much, or the class does not read it
                if isinstance(value, list) and isinstance(default, list):
                    layers = min(len(value), len(default))
                    if layers > 1 and value[:layers] == default[:layers]:
                        continue  # one entry a layer, of fewer or more layers
                yield place, key, value, default if default is not None else _other(value)


def _is_moot(name: str, value: Any, rope: dict[str, Any], default: dict[str, Any]) -> bool:
    """Returns whether Megatron's own rotation has this value in any case."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    kind = rope.get("rope_type", rope.get("type", "default"))
    if isinstance(value, dict) or name == "rope_theta":
        return True
    if kind == "default":
        return default.get("rope_type", kind) == kind
    rule = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    return kind == "llama3" and name in rule and value == rule[name].default


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or 1
    return None if isinstance(value, str) else [*reversed(value)] if value else None


if __name__ == "__main__":
    print(json.dumps(left_out(sys.argv[1])))
