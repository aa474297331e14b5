"""Sources of documents: every key, its type, default, bound and meaning, in one place."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from nemo_rod import parts
from nemo_rod.bounds import Bound, check_bounds, key, registered
from nemo_rod.corpus.filters import parse_filter
from nemo_rod.files import check_name

ROLES = ("adaptation", "replay")
_REQUIRED = dataclasses.MISSING
_ROLE = Bound(" or ".join(ROLES), ROLES.__contains__, ROLES)
_TEXT = Bound("a text that is not empty", bool)
_TYPE_NAMES = {
    str: "a text",
    bool: "a boolean (true or false)",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
    Sequence: "a list of texts",
    Mapping: "a mapping of plain values",
}


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """A source, as described under `domain.sources` or by a program.

    Raises:
        ValueError: A value has the wrong type or is out of bounds, or the reader cannot use it.
    """

    name: str  # name in reports; also a folder's
    role: str = key(_REQUIRED, _ROLE)  # adaptation: the new domain; replay: not to be forgotten
    kind: str = key(_REQUIRED, registered("readers"))  # format of the files, or another reader
    files: Sequence[str] = ()  # globs (** for any depth), or prefixes and weights; see docs/data.md
    text_field: str = key("text", _TEXT)  # field with the text; dotted if nested
    filter: str | None = None  # condition for keeping a record, such as language == "de"
    path: str | None = key(None, _TEXT)  # name or folder of a Hugging Face dataset, or model
    subset: str | None = key(None, _TEXT)  # configuration of the dataset
    split: str = key("train", _TEXT)  # split of the dataset; all: every split, by name
    revision: str | None = key(None, _TEXT)  # commit, branch or tag of the dataset, or model
    subsample: float = key(1.0, "in (0, 1]")  # share of the documents, by a hash of their content
    dedup: bool = False  # drop exact duplicates of earlier documents; reads the source twice
    document_holdout: bool = False  # hold out whole documents instead of blocks
    max_files: int | None = key(None, ">= 1")  # files at most, evenly spaced over the sorted paths
    max_documents: int | None = key(None, ">= 1")  # documents at most
    max_bytes: int | None = key(None, ">= 1")  # UTF-8 bytes at most; the last document is truncated
    max_tokens: int | None = key(None, ">= 1")  # tokens at most, with EODs; the last is truncated
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the reader's own keys

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            example = ("no", "yes")[self.name] if isinstance(self.name, bool) else self.name
            raise ValueError(
                f"domain.sources names a source {_yaml(self.name)}, which YAML reads as "
                f'{_TYPE_NAMES.get(type(self.name))}: quote it, as in "{example}".'
            )
        check_name("source", self.name)
        where = f"domain.sources.{self.name}."
        if self.kind == "megatron" and isinstance(self.files, list | tuple):  # weights are numbers
            texts = [str(f) if type(f) in (int, float) else f for f in self.files]
            object.__setattr__(self, "files", texts)
        for name, kind in get_type_hints(SourceSpec).items():
            if not _has_type(value := getattr(self, name), kind):
                advice = _advice(name, kind, value)
                raise ValueError(f"{where}{name}={_yaml(value)} is not valid: {advice}.")
        check_bounds(self, where)
        if self.kind in parts.OURS["readers"]:  # a reader of another package may use any of them
            required = "path" if self.kind in ("huggingface", "generated") else "files"
            if not getattr(self, required):
                raise ValueError(f"{where}{required} is missing: kind={self.kind} requires it.")
            unused = [] if self.kind == "generated" else ["files", "path", "options"]
            if self.kind == "megatron":
                unused += ["filter", "max_bytes", *["text_field"] * (self.text_field != "text")]
            for name in unused:
                if name != required and (value := getattr(self, name)):
                    raise ValueError(
                        f"{where}{name}={_yaml(value)} is not valid: kind={self.kind} reads "
                        f"{required} instead; remove {name}."
                    )
        if self.kind == "megatron" and any(weight is not None for weight, _ in blend(self)):
            for name in ("max_files", "max_documents", "max_tokens"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{where}{name}={getattr(self, name)} would cut the blend of files off in "
                        "its last prefixes: use subsample, which keeps the blend, or no weights."
                    )
        try:
            parse_filter(self.filter)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None


def blend(spec: SourceSpec) -> list[tuple[float | None, str]]:
    """Returns the prefixes of a source of kind megatron and their weights, None if it has none.

    As for Megatron-LM's ``--data-path``, `files` are prefixes, or weight, prefix, weight, prefix.

    Raises:
        ValueError: Some prefixes have weights and others have not, or a weight is not positive.
    """
    weights: list[float | None] = []
    for item in spec.files:
        try:
            weights.append(float(item))
        except ValueError:
            weights.append(None)
    if all(weight is None for weight in weights):
        return [(None, prefix) for prefix in spec.files]
    pairs = [*zip(weights[::2], weights[1::2], spec.files[1::2], strict=False)]
    if len(spec.files) % 2 or any(w is None or no is not None for w, no, _ in pairs):
        raise ValueError(
            f"domain.sources.{spec.name}.files={_yaml([*spec.files])} is not valid: expected "
            "prefixes, or a weight before each prefix, as in [0.3, a, 0.7, b]."
        )
    for weight, _, prefix in pairs:
        if not 0 < (weight or 0) < math.inf:
            raise ValueError(
                f"domain.sources.{spec.name}.files gives {prefix} the weight {weight}: expected a "
                "positive number; leave out a prefix that is not to be read."
            )
    return [(weight, prefix) for weight, _, prefix in pairs]


def parse_sources(
    sources: Mapping[Any, Any], *, holdout_floor: int | None = None
) -> list[SourceSpec]:
    """Parses the sources of a recipe.

    Args:
        sources: Keys of each source, by its name.
        holdout_floor: See `check_sources`.

    Raises:
        ValueError: There is no source, or one cannot be read as described.
    """
    known = [field.name for field in dataclasses.fields(SourceSpec) if field.name != "name"]
    specs = []
    for name, values in sources.items():
        if not isinstance(values, Mapping) or not {"role", "kind"} <= values.keys():
            raise ValueError(
                f"domain.sources.{name} is {values!r:.60}: expected the keys of a source, role and "
                "kind among them."
            )
        if unknown := sorted(map(str, values.keys() - known)):
            raise ValueError(
                f"domain.sources.{name} has the unknown key {unknown[0]!r}: expected some of "
                f"{', '.join(sorted(known))}."
            )
        specs.append(SourceSpec(name=name, **values))
    check_sources(specs, holdout_floor)
    return specs


def check_sources(specs: Sequence[SourceSpec], holdout_floor: int | None) -> None:
    """Refuses sources that cannot share a store.

    Raises:
        ValueError: There is none, two have one name, or `holdout_floor`, which holds out single
            blocks, meets a source that holds out documents.
    """
    if not specs:
        raise ValueError("domain.sources is empty: name at least one source.")
    names = [spec.name for spec in specs]
    for spec in specs:
        if names.count(spec.name) > 1:
            raise ValueError(f"domain.sources names {spec.name!r} twice: names must differ.")
        if holdout_floor and spec.document_holdout:
            raise ValueError(
                f"domain.sources.{spec.name}.document_holdout=true and domain.holdout_floor="
                f"{holdout_floor} exclude each other: a floor holds out single blocks; leave out "
                "one of them."
            )


def _has_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is UnionType:
        return any(_has_type(value, option) for option in get_args(kind))
    if get_origin(kind) is Sequence:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if get_origin(kind) is Mapping:
        return isinstance(value, Mapping) and _is_plain(value)
    kinds = int | float if kind is float else kind
    return isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _advice(name: str, kind: Any, value: object) -> str:
    """Returns the types that a key has, and how YAML turned its value into another."""
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    advice = "expected " + " or ".join(_TYPE_NAMES[get_origin(one) or one] for one in options)
    default = SourceSpec.__dataclass_fields__[name].default
    if value is None and default is not _REQUIRED:
        return f"{advice}; remove the key for its default, {_yaml(default)}"
    texts = value if get_origin(kind) is Sequence and isinstance(value, list) else [value]
    for text in texts if texts is value or str in options else ():
        if isinstance(text, int | float):
            return f"{advice}; YAML reads {_yaml(text)} as {_TYPE_NAMES[type(text)]}: quote it"
    if isinstance(value, str) and {bool, int, float} & {*options}:
        advice += ", without quotes"
    return advice


def _yaml(value: object) -> str:
    """Returns a value as YAML has it, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}..."
