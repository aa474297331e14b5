"""The base's weights beside those in training, for terms that keep a model near its base."""

from __future__ import annotations

from typing import Any


class BaseWeights:
    """A copy of the base's weights on this rank, in their dtype.

    It is taken when the model is built, before the weights of a checkpoint are loaded: a run that
    resumes has the same.

    Args:
        provider: Megatron-Bridge's provider of the model.
    """

    def __init__(self, provider: Any) -> None:
        self._chunks: list[dict[str, Any]] = []
        provider.register_pre_wrap_hook(self._keep)

    def _keep(self, model: list) -> list:
        self._chunks = [
            {name: weight.detach().clone() for name, weight in chunk.named_parameters()}
            for chunk in model
        ]
        return model

    def beside(self, model: list) -> list[tuple[Any, dict[str, Any]]]:
        """Returns every chunk of a model without its wrappers, and the base's weights by name."""
        from megatron.core.utils import unwrap_model

        chunks = unwrap_model(model)
        for number, chunk in enumerate(chunks):
            if {*self._chunks[number]} != {name for name, _ in chunk.named_parameters()}:
                raise ValueError(
                    "train.terms has lora after a term that keeps the base's weights, which it "
                    "renames: name it first."
                )
            self._chunks[number] = {
                name: self._chunks[number][name].to(weight)  # the wrappers have moved the model
                for name, weight in chunk.named_parameters()
            }
        return list(zip(chunks, self._chunks, strict=True))
