"""Compares a base with its own class of transformers before anything is trained or scored.

Megatron-Bridge carries over the keys of a config.json that it knows and ignores the others: another
rotation of positions, a window of attention. The weights fit, and only the losses tell.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray

from nemo_rod.checkpoints import losses as hf_losses
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.jobs import ModelJob
from nemo_rod.megatron.config_keys import left_out
from nemo_rod.megatron.models import build
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.watch import UNWATCHED, Heartbeat
from nemo_rod.ranks import from_recorder

FILE = "compared.json"  # written beside the checkpoint
_BLOCKS = 2
_SMALL = 4 * 2**30  # bytes of the weights in fp32, up to which a CPU compares in fp32
_LENGTH = 256  # tokens of a block that a CPU compares
_MISTAKES = (AttributeError, KeyError, TypeError, StrictDataclassError)  # of a configuration
_LIMIT = re.compile(r".*(window|chunk_size|max_position_embeddings).*")


def compare_base(job: ModelJob, hf: str, heartbeat: Heartbeat = UNWATCHED) -> None:
    """Refuses a base whose losses on two blocks are not those of transformers. Collective.

    The result is in `FILE`, and a base is compared once. On a CPU, small models are compared in
    fp32; others in the precision of the run. Every rank needs memory for its share of the model,
    then one of them for the class of transformers, read layer by layer where it does not fit.

    Raises:
        ValueError: the losses differ, or Megatron-Bridge cannot build the model.
    """
    file = Path(hf).parent / FILE
    if from_recorder(file.exists):
        return
    store = BlockStore(job.blocks, on_read=heartbeat.announce)
    block_ids = np.linspace(0, len(store) - 1, _BLOCKS).astype(np.int64)
    bytes_in_fp32 = hf_losses.num_bytes(Path(hf), torch.float32)
    is_small = not torch.cuda.is_available() and bytes_in_fp32 <= _SMALL
    model = dataclasses.replace(
        job.config.model, precision="fp32" if is_small else job.config.model.precision
    )
    compared = dataclasses.replace(job, config=dataclasses.replace(job.config, model=model))

    def of_transformers() -> dict[str, Any]:
        result = _of_transformers(hf, store.tokens(block_ids), compared)
        if not np.isfinite(result.get("losses", 0.0)).all():
            raise ValueError(
                f"{hf} has a loss of {np.mean(result['losses'])} nats in transformers' own "
                f"{result['class']}: its weights are damaged; copy it again, or choose another"
            )
        return result

    expected = from_recorder(of_transformers)
    heartbeat.beat()
    found = _of_bridge(compared, hf, store, block_ids, expected.get("length"), heartbeat)
    tolerance = hf_losses.TOLERANCE[model.precision]

    def judge() -> None:
        if "losses" in expected:
            expected["difference"] = abs(float(found.mean()) - np.mean(expected["losses"]))
            if expected["difference"] > tolerance and expected.pop("routes"):
                tokens_CS = store.tokens(block_ids)[:, : expected["length"] + 1]
                reference = hf_losses.load(Path(hf), trust_remote_code=model.trust_remote_code)
                expected["difference"] = hf_losses.distance(
                    reference, tokens_CS, float(found.mean()), tolerance
                )
            if not expected["difference"] <= tolerance:
                raise ValueError(
                    f"{hf} has a loss of {found.mean():.5f} nats on two blocks as Megatron-Bridge "
                    f"builds it, and of {np.mean(expected['losses']):.5f} in transformers' own "
                    f"{expected['class']}; the two may differ by {tolerance:g}{_cure(hf, model)}"
                )
        write_json(file, {**expected, "bridge": found.tolist(), "precision": model.precision})

    from_recorder(judge)


def _cure(hf: str, model: Any, *, is_built: bool = True) -> str:
    """Returns the end of a refusal: what Bridge ignores, or cannot build, and what to do."""
    keys: list[str] = []
    with suppress(Exception):  # transformers may not read the configuration either
        keys = left_out(hf, model.trust_remote_code, is_built=is_built)
    what = "takes no account of" if is_built else "may lack the way to compute that is asked for by"
    which = f"it {what} {', '.join(keys)} of config.json; " if keys else ""
    return f": {which}choose another base, or a version of Megatron-Bridge that computes this one"


def _of_bridge(
    job: ModelJob,
    hf: str,
    store: BlockStore,
    block_ids: NDArray[np.int64],
    length: int | None,
    heartbeat: Heartbeat,
) -> NDArray[np.float32]:
    """Returns the losses of blocks by the model that Megatron-Bridge builds. Collective."""
    try:
        _, chunks = build(job, hf, store.block_size)
        scorer = MegatronScorer(
            chunks,
            store,
            ProcessGroupCollection.use_mpu_process_groups(),
            micro_batch_size=1,
            length=length,
            beat=heartbeat.beat,
        )
        losses = scorer.losses(block_ids)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NameError,
            RuntimeError, TypeError, ValueError) as error:  # fmt: skip
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        module = at.tb_frame.f_globals["__name__"] if at else ""
        is_ours = isinstance(error, ValueError) and "nemo_rod" in module
        # of memory or processes; shapes that do not fit are a RuntimeError, too
        is_fault = type(error) is RuntimeError and not re.search("shape|size", str(error))
        if is_ours or is_fault or type(error).__module__.startswith("torch"):
            raise
        lines = [line.strip(" \t\u2717:.") for line in str(error).splitlines() if line.strip()]
        # of a library, which prints it to the log in full
        raise ValueError(
            f"{hf} cannot be built by Megatron-Bridge ({' '.join(lines[:1])[:200]})"
            f"{_cure(hf, job.config.model, is_built=False)}"
        ) from error
    del scorer, chunks
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    parallel_state.destroy_model_parallel()
    return losses


def _of_transformers(hf: str, tokens_CS: NDArray[np.int32], job: ModelJob) -> dict[str, Any]:
    """Returns the losses of blocks by transformers' class; a reason instead if it has none."""
    folder, model = Path(hf), job.config.model
    dtype = torch.float32 if model.precision == "fp32" else torch.bfloat16
    needed = int(1.2 * hf_losses.num_bytes(folder, dtype))
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            free: dict[Any, int] = {device: int(0.8 * torch.cuda.mem_get_info(device)[0])}
            options["device_map"] = {"": device}
        else:
            free = {"cpu": psutil.virtual_memory().available}
        if needed > min(free.values()):  # then its layers are read one after the other
            host = {"cpu": int(0.8 * psutil.virtual_memory().available)}
            options = {"device_map": "auto", "max_memory": free | host}
            options["offload_folder"] = stack.enter_context(TemporaryDirectory())
        reference = None
        try:
            reference = hf_losses.load(
                folder, dtype=dtype, trust_remote_code=model.trust_remote_code, **options
            )
            length = size = tokens_CS.shape[1]
            if not torch.cuda.is_available():  # fewer of a block, unless a window ends within it
                config = reference.config.get_text_config().to_dict()
                found = {**config, **(config.get("rope_parameters") or {})}.items()
                limits = [v for key, v in found if isinstance(v, int) and _LIMIT.fullmatch(key)]
                length = size if any(0 < n < size for n in limits) else min(size, _LENGTH)
                if any(map(hf_losses.forgets_chunks, reference.modules())):
                    length = min(size, int(config["chunk_size"]) // 2)
            read_CS = tokens_CS[:, : length + 1]  # includes the last target
            losses = hf_losses.block_losses(reference, read_CS)
        except Exception as error:  # any class, or code that comes with the checkpoint
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            if isinstance(error, _MISTAKES) and reference is None and not model.trust_remote_code:
                said = str(error).partition("\n")[0].strip(":")
                raise ValueError(
                    f"{hf} does not fit its class of transformers ({said}): correct its config.json"
                ) from error
            print(
                f"  Warning: transformers cannot compute losses of {hf} here ({reason}), so that "
                "those of Megatron-Bridge are not compared with them.",
                flush=True,
            )
            return {"not_compared": reason}
    routes = any(name.endswith(("router", ".gate")) for name, _ in reference.named_modules())
    values = {"losses": losses.tolist(), "class": type(reference).__name__, "length": length}
    return {**values, "routes": routes}
