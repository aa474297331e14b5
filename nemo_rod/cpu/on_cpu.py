"""Runs a host's unmodified script on a machine without CUDA.

    python -m nemo_rod.cpu.on_cpu core make_data.py
    python -m nemo_rod.cpu.on_cpu megatron_bridge pretrain.py
    python -m nemo_rod.cpu.on_cpu megatron_lm CHECKOUT/pretrain_gpt.py --num-layers ...

Under torchrun, `-m nemo_rod.cpu.on_cpu megatron_lm SCRIPT` takes the place of the script. The
host `core` is for scripts that only need megatron-core. A job's configuration must still request
plain torch and gloo.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

from nemo_rod import cpu

cpu.prepare()  # must run before the imports below, in every process

import megatron.core  # noqa: E402

from nemo_rod.cpu import trainers  # noqa: E402
from nemo_rod.hosts.save_helpers import end_with_rank  # noqa: E402
from nemo_rod.signals import end_with_parent  # noqa: E402


def main(arguments: list[str]) -> None:
    """Prepares the host, the first argument, and runs the script, the second, as `__main__`.

    Raises:
        ValueError: the host is unknown or the script is missing.
    """
    prepare: dict[str, Callable[[], None]] = {
        "core": cpu.install,
        "megatron_bridge": trainers.install_megatron_bridge,
        "megatron_lm": trainers.install_megatron_lm,
    }
    if len(arguments) < 2 or arguments[0] not in prepare:
        hosts = "|".join(prepare)
        raise ValueError(f"Usage: python -m nemo_rod.cpu.on_cpu {hosts} SCRIPT ARGUMENTS...")
    host, script = arguments[0], Path(arguments[1])
    if not script.is_file():
        raise ValueError(f"{script} is not a file: give the path of the training script.")
    _prefer_megatron_of(script.resolve().parent)
    torch.set_num_threads(1)
    prepare[host]()
    end_with_rank()
    if torch.distributed.is_torchelastic_launched():  # a killed torchrun would leave its ranks
        end_with_parent()
    sys.argv = arguments[1:]
    # Not runpy.run_path: the processes that write checkpoints import the main module again and
    # must find this one, which makes Megatron importable, rather than the script.
    module = types.ModuleType("__main__")
    module.__file__, module.__spec__ = str(script), sys.modules["__main__"].__spec__
    sys.modules["__main__"] = module
    exec(compile(script.read_text(), str(script), "exec"), vars(module))


def _prefer_megatron_of(folder: Path) -> None:
    """Puts the script's folder first on the path, as Python does, and uses its megatron-core.

    This module has already imported megatron-core. If that is a different copy, the
    process restarts.

    Raises:
        ValueError: the folder's megatron-core cannot be imported.
    """
    core = folder / "megatron" / "core"
    if not core.is_dir() or core.samefile(megatron.core.__path__[0]):
        sys.path.insert(0, str(folder))
        return
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) in searched:
        raise ValueError(
            f"{megatron.core.__path__[0]} was imported instead of {core}: run the script from "
            "another folder, and without -I and -E."
        )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), *searched]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
