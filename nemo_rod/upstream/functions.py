"""Checks that NVIDIA's functions still have the parameters that nemo_rod was tested with.

A moved parameter may raise no error: megatron-core 0.18 put a switch in the place of the process
group of a function that cuts batches, and every rank cut by the whole world. Each road therefore
calls `check` first, and runs only if the functions that nemo_rod calls by position, wraps or
replaces, listed in `functions.txt`, still match the tested ones.

The use of a function is written like a call: names before `*` are passed by position, names after
it by keyword, and `...` stands for any further parameters.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast

Use = Literal["called", "wrapped", "replaced", "read"]

# prefix of a module's name -> name of the package, and the versions to install
_PACKAGES = {
    "megatron.core": ("megatron-core", "0.16.1 to 0.19.2"),
    "megatron.bridge": ("Megatron-Bridge", "0.3.1 to 0.6.2"),
    "megatron.training": ("Megatron-LM", "core_v0.16.1, core_v0.19.0 or main of August 2026"),
    "megatron.legacy": ("Megatron-LM", "core_v0.16.1, core_v0.19.0 or main of August 2026"),
}


# the newest tested release of each package that is on the index
TESTED = {
    name.lower(): versions.rpartition(" ")[2]
    for name, versions in _PACKAGES.values()
    if name in ("megatron-core", "Megatron-Bridge")
}


class Function(NamedTuple):
    """One function, method or class, and the requirements on its parameters."""

    where: str  # location of the function, `module:name`
    # "called": with only the arguments in `relies_on`; "wrapped": called with its callers'
    # arguments, of which `relies_on` is read or set; "replaced": by a function that takes exactly
    # `relies_on`; "read": an object passed to us that has these fields
    use: Use
    roads: tuple[str, ...]  # roads that use the function, of `ROADS`
    relies_on: str = ""  # parameters that nemo_rod relies on; see the docstring of this module
    tested: tuple[str, ...] = ()  # whole signatures where they are more specific, one per variant
    optional: bool = False  # whether some versions lack it, and nemo_rod then works without it

    @property
    def package(self) -> str:
        """Package of the function, a key of `_PACKAGES`."""
        name = self.where.replace(":", ".")
        return next(root for root in _PACKAGES if name.startswith(f"{root}."))

    @property
    def signatures(self) -> tuple[str, ...]:
        """Tested parameters, one text per variant."""
        return self.tested or (self.relies_on,)

    def installed_signature(self) -> inspect.Signature | None:
        """Returns the installed signature; None if there is no such function."""
        module, _, path = self.where.partition(":")
        try:
            target = importlib.import_module(module)
            for name in path.split("."):
                target = getattr(target, name)
            return inspect.signature(target)  # type: ignore[arg-type]
        except (AttributeError, TypeError):
            return None
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # a dependency of NVIDIA's package is missing, not the package itself
            return None

    def fits(self, signature: inspect.Signature) -> bool:
        """Returns whether nemo_rod's use of the function matches an installed signature."""
        by_place, by_name = (
            [name.strip() for name in part.split(",") if name.strip()]
            for part in f"{self.relies_on}*".split("*")[:2]
        )
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        if self.use == "replaced" and "..." not in by_place:
            return [*kinds] == by_place[: len(kinds)]
        if inspect.Parameter.VAR_POSITIONAL in kinds.values():
            return True  # a decorator hides the parameters: nothing can be checked
        by_place = [name for name in by_place if name != "..."]
        places = [name for name, kind in kinds.items() if kind != inspect.Parameter.KEYWORD_ONLY]
        if places[: len(by_place)] != by_place or not {*by_name} <= {*kinds}:
            return False
        required = {
            name
            for name, parameter in signature.parameters.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind != inspect.Parameter.VAR_KEYWORD
        }
        return self.use != "called" or required <= {*by_place, *by_name}

    def problem(self) -> str | None:
        """Returns one sentence if the installed function differs from the tested one."""
        signature = self.installed_signature()
        if self.optional if signature is None else self.fits(signature):
            return None
        name, versions = _PACKAGES[self.package]
        shown = (
            "does not exist" if signature is None else f"takes ({', '.join(signature.parameters)})"
        )
        from_checkout = self.package in ("megatron.training", "megatron.legacy")
        root = importlib.import_module("megatron.core" if from_checkout else self.package)
        version = getattr(root, "__version__", "of an unknown version")
        return (
            f"{self.where.replace(':', '.')} {shown} in {name} {version}: expected "
            f"({') or ('.join(self.signatures)}), with which nemo_rod was tested; install {name} "
            f"{versions}, or a newer nemo_rod."
        )


def check(*roads: str) -> None:
    """Refuses an installation whose functions differ from the tested ones.

    Raises:
        ValueError: a function of these roads differs; the message names the first one, its
            installed parameters and the versions to install.
    """
    for road in roads:
        for function in for_road(road):
            if problem := function.problem():
                raise ValueError(problem)


def for_road(road: str) -> list[Function]:
    """Returns the functions that a road uses."""
    assert road in ROADS, road
    return [function for function in FUNCTIONS if road in function.roads]


def _list_functions() -> Iterator[Function]:
    """Yields the functions of `functions.txt`, whose first lines describe its format."""
    text = Path(__file__).with_name("functions.txt").read_text(encoding="utf-8")
    roads: tuple[str, ...] = ()
    for line in re.sub(r"\n +", " ", text).splitlines():
        if line.startswith("["):
            roads = tuple(line[1:-1].split())
        elif line and line[0] != "#":
            first, *tested = re.findall(r"\( ?(.*?)\)", line)
            *optional, use, where = line.partition("(")[0].split()
            yield Function(where, cast(Use, use), roads, first, tuple(tested), bool(optional))


FUNCTIONS = tuple(_list_functions())
ROADS = tuple(dict.fromkeys(road for function in FUNCTIONS for road in function.roads))
