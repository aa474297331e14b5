"""Lets NeMo-RL run on this environment: other versions of Python, torch and transformers, no CUDA.

Every Python process with this folder on its path runs it, Ray's workers included. Nothing happens
until `nemo_rl` is imported, and its own Megatron worker.
"""

import importlib
import importlib.abc
import sys


class _Before(importlib.abc.MetaPathFinder):
    """Calls a function before a module is imported for the first time."""

    def __init__(self, module, call):
        self._module, self._call = module, call

    def find_spec(self, name, path=None, target=None):
        if name == self._module:
            sys.meta_path.remove(self)
            self._call()
        return None


def _prepare():
    import copyreg
    import typing

    import typing_extensions
    from torch.distributed import config

    # newer than NeMo-RL's torch; Ray finds its name in the code of the worker's `train`
    copyreg.pickle(type(config), lambda module: (importlib.import_module, (module.__name__,)))

    if sys.version_info < (3, 12):  # pydantic refuses the TypedDict of an older typing
        typing.TypedDict = typing_extensions.TypedDict
        typing.override = typing_extensions.override

    from transformers.models.auto import tokenization_auto

    # v0.7.0 imports this name of transformers 5; Megatron-Bridge 0.3.1 wants transformers 4
    if not hasattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"):
        tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS = set()


def _stand_in():
    import without_cuda

    without_cuda.install()


sys.meta_path.insert(0, _Before("nemo_rl", _prepare))
worker = "nemo_rl.models.policy.workers.megatron_policy_worker"
sys.meta_path.insert(0, _Before(worker, _stand_in))
