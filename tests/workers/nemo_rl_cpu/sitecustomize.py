"""Lets NeMo-RL run on this environment: an older Python and transformers, and no CUDA.

Every Python process with this folder on its path runs it, Ray's workers included. Nothing happens
until `nemo_rl` is imported.
"""

import importlib.abc
import sys


class _BeforeNemoRL(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "nemo_rl":
            sys.meta_path.remove(self)
            _prepare()
        return None


def _prepare():
    import typing

    import typing_extensions

    if sys.version_info < (3, 12):  # pydantic refuses the TypedDict of an older typing
        typing.TypedDict = typing_extensions.TypedDict
        typing.override = typing_extensions.override

    from transformers.models.auto import tokenization_auto

    # v0.7.0 imports this name of transformers 5; Megatron-Bridge 0.3.1 wants transformers 4
    if not hasattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"):
        tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS = set()


sys.meta_path.insert(0, _BeforeNemoRL())
