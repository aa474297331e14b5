"""Megatron-LM's `pretrain_gpt.py` with Replay on Demand, from corpora to training, without a GPU.

    python run.py CHECKOUT FOLDER

CHECKOUT is Megatron-LM at tag core_v0.16.1 or core_v0.19.0, or its main branch, and stays as it is:
copies of its script get the lines of `install.py`, `reference_new.py` and `reference_old.py` before
their call of `pretrain`.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
CALL = "\n    pretrain(\n"  # where the script starts the job
MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --swiglu --disable-bias-linear
    --normalization LayerNorm --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 255
"""
TRAINING = """
    --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --lr-decay-style constant --split 900,50,50
    --eval-iters 1 --eval-interval 4 --log-interval 1 --ckpt-format torch_dist --num-workers 0
"""
# What plain torch and gloo cannot do. A job on GPUs says none of this.
WITHOUT_GPU = """
    --transformer-impl local --distributed-backend gloo --attention-backend unfused
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
    --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
"""
NEW, OLD = "data/new/text_document", "data/old/text_document"
BOTH = f"1 {NEW} 1 {OLD}"
STEPS = 8


def with_lines(lines: str, checkout: Path, folder: Path) -> Path:
    """A copy of a checkout's `pretrain_gpt.py` with more lines, and links to all else."""
    folder.mkdir(parents=True)
    for path in checkout.resolve().iterdir():
        if path.name != "pretrain_gpt.py":
            (folder / path.name).symlink_to(path)
    before, after = (checkout / "pretrain_gpt.py").read_text().split(CALL)
    script = folder / "pretrain_gpt.py"
    script.write_text(f"{before}\n{textwrap.indent(lines, '    ')}{CALL}{after}")
    return script


def arguments(data: str, steps: int, more: str) -> list[str]:
    """The job's arguments."""
    job = f"--data-path {data} --train-iters {steps} --save-interval {steps} {more}"
    return f"{MODEL} {TRAINING} {WITHOUT_GPU} {job}".split()


def main() -> None:
    """A base of the old corpus, a specialist of the new one, both references, and RoD."""
    checkout, folder = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True)

    def run(*command: object) -> None:
        subprocess.run([sys.executable, *map(str, command)], cwd=folder, check=True)

    def job(name: str, data: str, steps: int, more: str, lines: str = "") -> None:
        print(f"{name}: {lines or 'the stock script'}", flush=True)
        text = (HERE / lines).read_text() if lines else ""
        script = with_lines(text, checkout, folder / "scripts" / name)
        host = ("nemo_rod.cpu.on_cpu", "megatron_lm", script)
        run(
            "-m",
            "torch.distributed.run",
            "--standalone",
            "-m",
            *host,
            *arguments(data, steps, more),
        )

    run("-m", "nemo_rod.cpu.on_cpu", "core", HERE.parent / "megatron_bridge/make_data.py", "data")
    job("base", OLD, 20, "--save base")
    job("specialist", NEW, 20, "--pretrained-checkpoint base --save specialist")
    job("reference_new", BOTH, STEPS, "", "reference_new.py")
    job("reference_old", BOTH, STEPS, "", "reference_old.py")
    job("rod", BOTH, STEPS, "--pretrained-checkpoint base --save rod --load rod", "install.py")
    run("-m", "nemo_rod.cli", "inspect", "rod/rod/curriculum.rod")


if __name__ == "__main__":
    main()
