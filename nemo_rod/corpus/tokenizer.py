"""Loads a tokenizer by its name."""

from nemo_rod.corpus.adapters.byte_tokenizer import ByteTokenizer
from nemo_rod.corpus.tokenizer_identity import Tokenizer

BYTE = "byte"  # the name of the tokenizer whose ids are bytes


def load_tokenizer(
    name: str, *, eod: int | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Loads a tokenizer by name.

    Args:
        name: ``byte``, a folder, or NAME or NAME@REVISION on the hub.
        eod: the id that ends a document; None for the tokenizer's own EOS token. The EOS token of
            a model with a chat template may end the turns of a conversation, and be unknown to its
            base.
        trust_remote_code: whether code that comes with the tokenizer may run.

    Raises:
        ValueError: the tokenizer does not exist, is not a fast one, has no token that ends a
            document, or comes with code that may not run.
    """
    if name == BYTE:
        return ByteTokenizer(eod)
    # which is also a program, and so is imported late
    from nemo_rod.corpus.adapters.hub_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(name, eod=eod, trust_remote_code=trust_remote_code)
