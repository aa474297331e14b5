"""Runs an unchanged script of a host on a machine without CUDA.

    python -m nemo_rod.megatron.on_cpu core make_data.py
    python -m nemo_rod.megatron.on_cpu megatron_bridge pretrain.py
    python -m nemo_rod.megatron.on_cpu megatron_lm CHECKOUT/pretrain_gpt.py --num-layers ...
    python -m nemo_rod.megatron.on_cpu nemo2 pretrain.py

Under torchrun, `-m nemo_rod.megatron.on_cpu megatron_lm SCRIPT` takes the place of the script. The
host `core` is for scripts that need megatron-core alone. A job's configuration must still ask for
plain torch and gloo.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

from nemo_rod.megatron import cpu
from nemo_rod.megatron.cpu import trainers


def main(arguments: list[str]) -> None:
    """Prepares the host and runs the script as `__main__`.

    Args:
        arguments: the host, the script's path and the script's own arguments.

    Raises:
        ValueError: if the host is unknown or the script is missing.
    """
    prepare: dict[str, Callable[[], None]] = {
        "core": cpu.install,
        "megatron_bridge": trainers.install_megatron_bridge,
        "megatron_lm": trainers.install_megatron_lm,
        "nemo2": trainers.install_nemo2,
    }
    if len(arguments) < 2 or arguments[0] not in prepare:
        hosts = "|".join(prepare)
        raise ValueError(f"Usage: python -m nemo_rod.megatron.on_cpu {hosts} SCRIPT ARGUMENTS...")
    host, script = arguments[0], Path(arguments[1])
    if not script.is_file():
        raise ValueError(f"{script} is not a file: give the path of the training script.")
    # last, so that megatron.core stays the installed one, whose helper is compiled
    sys.path.append(str(script.resolve().parent))
    torch.set_num_threads(1)
    prepare[host]()
    sys.argv = arguments[1:]
    # Not runpy.run_path: the processes that write checkpoints import the main module again. They
    # must find this one, which makes Megatron importable, and not the script.
    module = types.ModuleType("__main__")
    module.__file__, module.__spec__ = str(script), sys.modules["__main__"].__spec__
    sys.modules["__main__"] = module
    exec(compile(script.read_text(), str(script), "exec"), vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
