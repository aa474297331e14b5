"""Every number and every choice of the configuration has an exact bound, and a refusal names it."""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import composed
from omegaconf import MISSING, OmegaConf

from nemo_rod import parts
from nemo_rod.bounds import check_bounds
from nemo_rod.config import Config, Optimisation, Variant, config_class
from nemo_rod.parts import did_you_mean
from nemo_rod.run.checks import check
from nemo_rod.run.variants import arm_settings

VARIED = ("train", "selection", "scoring")  # sections whose keys a variant overrides
IN_WORDS: dict[str, tuple[list[Any], list[Any]]] = {  # bound -> refused values, accepted values
    "a share in [0, 1], or a trained arm": ([-0.1, 1.1, math.nan, [1], True], [0, 0.5, 1, "rod"]),
    f"some of {', '.join(parts.names('loggers'))}, such as [tensorboard,wandb]": (
        ["other", ["wandb", "other"], 3, {"wandb": True}],
        ["wandb", ["tensorboard", "mlflow"]],
    ),
    **{
        f"{', '.join(ours)}, or a name that a package registers": (["", "other"], ours)
        for ours in (
            parts.names("launchers"),
            *([*parts.names(kind), "FILE.py:NAME"] for kind in parts.FROM_FILES),
        )
    },
    "HH:MM:SS or D-HH:MM:SS, in YAML in quotes": (["14400", "4:00"], ["4:00:00", "2-12:00:00"]),
}


def keys(section: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


OF_CONFIG = dict(keys(config_class()(pretrain=Optimisation())))
OF_VARIANT = dict(keys(Variant()))
BOUNDED = {name: field for name, field in OF_CONFIG.items() if "bound" in field.metadata}
OF_VARIANTS = {name: field for name, field in OF_VARIANT.items() if "bound" in field.metadata} | {
    name: field for name, field in BOUNDED.items() if name.split(".")[0] in VARIED
}


def edges(field: dataclasses.Field) -> tuple[list[Any], list[Any]]:
    """Values just outside of a bound, and just inside of it."""
    text, whole = field.metadata["bound"].expected, field.type.startswith("int")
    number = re.fullmatch(r"(>|>=|in [(\[]) ?(\d+)(?:, ([\d*]+)([)\]]))?", text)
    if number is None:
        choices = re.split(", | or ", text)
        return IN_WORDS.get(text, (["", "other", choices[0] + " "], choices))
    refused, accepted = ([], []) if whole else ([math.nan, math.inf, -math.inf], [])
    opening, low, high, closing = number.groups()
    for end, closed, out in ((low, opening in (">=", "in ["), -1), (high, closing == "]", 1)):
        if end is not None:
            at = eval(end) if whole else float(end)
            beside = -out if closed is False else out
            other = at + beside if whole else math.nextafter(at, beside * math.inf)
            refused.append(other if closed else at)
            accepted.append(at if closed else other)
    return refused, accepted


def sentence(name: str, field: dataclasses.Field, value: Any) -> str:
    finite = "finite and " if value == math.inf else ""
    null = ", or null" if field.default is None else ""
    expected = field.metadata["bound"].expected
    near = did_you_mean(value, field.metadata["bound"].names) if isinstance(value, str) else ""
    return f"{name}={value!r} is not valid{near}: expected {finite}{expected}{null}."


@functools.cache
def toy() -> Config:
    return composed("recipe=toy")


def with_value(name: str, value: Any) -> Config:
    config = section = copy.deepcopy(toy())
    *path, last = name.split(".")
    for part in path:
        section = getattr(section, part)
    setattr(section, last, value)
    return config


def test_every_number_has_a_bound():
    numbers = {
        name
        for name, field in (OF_CONFIG | OF_VARIANT).items()
        if str(field.type).startswith(("int", "float"))
    }
    assert numbers and numbers <= {*BOUNDED, *OF_VARIANTS}


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_is_exact(name):
    field = BOUNDED[name]
    refused, accepted = edges(field)
    for value in refused:
        with pytest.raises(ValueError) as error:
            check(with_value(name, value))
        assert str(error.value) == sentence(name, field, value)
    default = [] if field.default == MISSING else [field.default]
    for value in [*accepted, *default]:
        check_bounds(with_value(name, value))


def test_a_word_of_the_sentence_is_no_suggestion():
    with pytest.raises(ValueError, match=r"'orr' is not valid: expected refuse or exclude\."):
        check_bounds(with_value("selection.on_nonfinite", "orr"))


@pytest.mark.parametrize("name", ["arms", "rebuild", "logger", "cluster.setup", "report.seeds"])
@pytest.mark.parametrize("item", [["rod"], {"rod": 1}])
def test_a_list_holds_no_others(name, item):
    with pytest.raises(ValueError, match=rf"^{name}=\[.*\] is not valid: expected a list without"):
        check(with_value(name, ["rod", item]))


@pytest.mark.parametrize("name", OF_VARIANTS)
def test_a_variant_has_the_same_bounds(name):
    field = OF_VARIANTS[name]
    section, _, key = name.rpartition(".")
    refused, accepted = edges(field)
    for value in refused:
        bad = {section: {key: value}} if section else {key: value}
        config = dataclasses.replace(toy(), variants={"bad": {"of": "rod", **bad}})
        with pytest.raises(ValueError) as error:
            arm_settings(config, "bad")
        assert str(error.value) == sentence(f"variants.bad.{name}", field, value)
    if not section:
        for value in [*accepted, field.default]:
            check_bounds(Variant(**{key: value}))


def test_only_settings_that_change_speed_alone_reach_megatron():
    experts = composed("recipe=german_qwen3_5_35b_a3b")
    assert experts.model.provider["moe_token_dispatcher_type"] == "flex"
    with pytest.raises(ValueError, match=r"model\.provider\.moe_router_topk is not among the set"):
        check(with_value("model.provider", {"moe_router_fusion": True, "moe_router_topk": 1}))


def test_a_key_without_a_default_stays_so():
    missing = OmegaConf.missing_keys(OmegaConf.structured(config_class()))
    assert missing >= {"train.steps", "train.batch_size", "train.lr", "scoring.micro_batch_size"}
