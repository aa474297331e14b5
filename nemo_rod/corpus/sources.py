"""Sources of documents: every key, its type, default, bound and meaning, in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar, get_type_hints

from nemo_rod import parts
from nemo_rod.bounds import TYPE_NAMES, Bound, as_yaml, check_bounds, check_types, key, name_bound
from nemo_rod.corpus.filters import parse_filter
from nemo_rod.files import check_name
from nemo_rod.roles import ROLES

T = TypeVar("T")
_ROLE = Bound(" or ".join(ROLES), ROLES.__contains__, ROLES)
_TEXT = Bound("a text that is not empty", bool)
_TAKEN = "nemo_rod_takes"  # attribute of a reader that `takes` sets
_READER_KEYS = (  # keys that a reader takes or refuses; all others apply to every source
    *("files", "text_field", "filter", "path", "subset", "split", "revision", "max_bytes"),
    "options",
)


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """A source, as described under `domain.sources` or by a program.

    Raises:
        ValueError: a value has the wrong type or is out of bounds, or the reader cannot use it.
    """

    name: str  # name in reports; also a folder's
    role: str = key(MISSING, _ROLE)  # adaptation: the new domain; replay: not to be forgotten
    kind: str = key(MISSING, name_bound("readers"))  # format of the files, or another reader
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
                f"domain.sources names a source {as_yaml(self.name)}, which YAML reads as "
                f'{TYPE_NAMES.get(type(self.name))}: quote it, as in "{example}".'
            )
        check_name("source", self.name)
        where = f"domain.sources.{self.name}."
        is_known = self.kind in parts.names("readers") or parts.file_of(str(self.kind))
        reader = parts.load("readers", self.kind, key=f"{where}kind") if is_known else None
        taken = getattr(reader, _TAKEN, {})
        types = get_type_hints(SourceSpec) | taken.get("types", {})
        check_types(self, types, where)
        check_bounds(self, where)
        if taken:
            required = taken["keys"][0]
            if not getattr(self, required):
                raise ValueError(f"{where}{required} is missing: kind={self.kind} requires it.")
            for name in [name for name in _READER_KEYS if name not in taken["keys"]]:
                default = SourceSpec.__dataclass_fields__[name].default
                if (value := getattr(self, name)) and value != default:
                    raise ValueError(
                        f"{where}{name}={as_yaml(value)} is not valid: kind={self.kind} reads "
                        f"{required} instead; remove {name}."
                    )
        try:
            parse_filter(self.filter)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        taken.get("check", bool)(self)


def takes(
    required: str, *keys: str, check: Callable[[SourceSpec], Any] = bool, **types: Any
) -> Callable[[T], T]:
    """Declares the keys of a source that a reader takes; without that, it may take any.

    Args:
        required: key that names the input.
        keys: further ones of `_READER_KEYS`.
        check: called with every source of the kind; refuses values by a ValueError.
        types: types of keys, where `SourceSpec` has others.
    """

    def declare(reader: T) -> T:
        setattr(reader, _TAKEN, {"keys": (required, *keys), "types": types, "check": check})
        return reader

    return declare


def parse_sources(
    sources: Mapping[Any, Any], *, holdout_floor: int | None = None
) -> list[SourceSpec]:
    """Parses the sources of a recipe, by name, and checks them by `check_sources`.

    Raises:
        ValueError: there is no source, or one cannot be read as described.
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
        ValueError: there is no source, two have one name, or a source holds out documents despite
            `holdout_floor`, which holds out single blocks.
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
