"""Pickles in checkpoints, read without running what they name.

A pickle may name any function of any module, with arguments of its own. These readers build plain
values, tensors, and those classes of torch and Megatron that only hold data.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

_OF_CHECKPOINTS = ("torch.distributed.checkpoint.", "megatron.")  # their enums and dataclasses
_PLAIN = {
    ("__builtin__", "set"),
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("pathlib", "PosixPath"),
    ("signal", "Signals"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" or module.startswith(_OF_CHECKPOINTS):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype | torch.memory_format | torch.layout):
                return found
            is_class = isinstance(found, type) and module != "torch"
            if is_class and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_metadata(file: Path) -> Any:
    """Reads the `.metadata` of a checkpoint of torch.distributed.checkpoint.

    Raises:
        ValueError: if it is damaged, or names something that is no part of a checkpoint.
    """
    with file.open("rb") as stream:
        return _refusing(file, lambda: _Unpickler(stream).load())


def load_state(source: Path | IO[bytes], named: Path) -> Any:
    """Reads what `torch.save` wrote.

    Args:
        source: the file, or its content.
        named: file or folder to name in an error.

    Raises:
        ValueError: if it is damaged, or names something that is no part of a checkpoint.
    """
    reader = SimpleNamespace(
        __name__="pickle",
        Unpickler=_Unpickler,
        load=lambda stream, **options: _Unpickler(stream, **options).load(),
    )

    def read() -> Any:
        if _is_script(source):
            raise ValueError("it is a program of TorchScript")  # torch would load it otherwise
        return torch.load(source, map_location="cpu", pickle_module=reader, weights_only=False)

    return _refusing(named, read)


def _is_script(source: Path | IO[bytes]) -> bool:
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        begin = file.tell()
        try:
            if not zipfile.is_zipfile(file):
                return False
            with zipfile.ZipFile(file) as archive:
                return any(name.endswith("/constants.pkl") for name in archive.namelist())
        finally:
            file.seek(begin)


def _refusing(named: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError:
        raise
    except MemoryError:  # a flipped bit of a length asks for as much as a large checkpoint
        raise ValueError(
            f"{named} asks for more memory than there is: restore it from a copy, save the "
            "checkpoint again, or take a machine with more"
        ) from None
    except Exception as error:  # a damaged pickle may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{named} is no state of a checkpoint of torch or Megatron ({reason}): restore it from "
            "a copy, or save the checkpoint again"
        ) from None
