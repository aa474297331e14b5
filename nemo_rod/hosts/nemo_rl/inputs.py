"""The inputs of a run on NeMo-RL: its block store, references and arm, and their digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_rod.config import Scoring, Selection
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.files import digest
from nemo_rod.hosts.nemo_rl.settings import SAVES_MEMORY
from nemo_rod.selection import References
from nemo_rod.selection.arms import Arm, make_arm, typed_values
from nemo_rod.selection.references.folder import precision_name
from nemo_rod.trust import UntrustedCodeError, name_and_revision


def open_store(config: dict[str, Any]) -> BlockStore:
    """Opens the block store and checks that it matches the configured model.

    Raises:
        ValueError: the block size or the tokenizer differs, or NeMo-RL would run code that lies
            beside the checkpoint and is not trusted.
    """
    policy, store = config["policy"], BlockStore(config["rod"]["blocks"])
    if policy["max_total_sequence_length"] != store.block_size:
        raise ValueError(
            f"policy.max_total_sequence_length is {policy['max_total_sequence_length']}, but the "
            f"blocks in {config['rod']['blocks']} have {store.block_size} tokens: set it to that."
        )
    rod, trusted = config["rod"], config["rod"]["trust_remote_code"]
    if not trusted:  # NeMo-RL itself never asks
        for name in (policy["model_name"], policy["tokenizer"]["name"]):
            refuse_own_code(name)
    name = rod["tokenizer"] or policy["tokenizer"]["name"]
    store.check_tokenizer(load_tokenizer(name, eod=rod["eod"], trust_remote_code=trusted))
    return store


def open_references(config: dict[str, Any], store: BlockStore) -> References:
    """Opens the references; raises a ValueError for another store or precision."""
    precision = precision_name(config["policy"]["precision"])
    return References.open(config["rod"]["references"], store, precision=precision)


def build_arm(config: dict[str, Any], store: BlockStore) -> Arm:
    """Returns the configured arm, with its pools and policy.

    Raises:
        ValueError: there is no such arm.
    """
    rod = config["rod"]
    if rod["variant"] is not None:
        return Arm(**rod["variant"])
    return make_arm(
        rod["arm"],
        num_adaptation=store.num_adaptation,
        num_replay=store.num_replay,
        batch_size=config["policy"]["train_global_batch_size"],
        seed=rod["seed"],
        **typed_values(
            {"selection": Selection(**rod["selection"]), "scoring": Scoring(**rod["scoring"])}
        ),
    )


def config_digest(config: dict[str, Any], arm: Arm) -> str:
    """Returns the digest of the settings that determine the choices, for the curriculum's header.

    Store and references have digests of their own. The layout, the paths of files and the settings
    that only save memory may change between two attempts. A recipe's job brings its own digest,
    and its stage compares the model and the overrides in `nemo_rl`.
    """
    policy, rod = config["policy"], config["rod"]
    if rod["config_digest"] is not None:
        return str(rod["config_digest"])
    model = policy["model_name"]
    if Path(model).is_dir():  # not its path; the digest of the references covers the content
        files = sorted(Path(model).glob("*.safetensors"))
        model = digest(json.dumps([(file.name, file.stat().st_size) for file in files]).encode())
    megatron = policy["megatron_cfg"]
    optimizer = megatron.get("optimizer") or {}
    determining = {
        "model": model,
        **{key: policy[key] for key in ("precision", "train_global_batch_size")},
        "arm": arm.inputs(),
        "steps": rod["steps"],
        "on_nonfinite": "refuse",  # constant: a refused run may continue with "exclude"
        "optimizer": {k: v for k, v in optimizer.items() if k not in SAVES_MEMORY},
        "scheduler": megatron.get("scheduler"),
    }
    return digest(json.dumps(determining, sort_keys=True, default=str).encode())


def refuse_own_code(checkpoint: str) -> None:
    """Refuses a checkpoint, or tokenizer, with its own code, which NeMo-RL always runs.

    It is a folder, or a name on the hub.

    Raises:
        UntrustedCodeError: its config.json or tokenizer_config.json names such code.
    """
    for name in ("config.json", "tokenizer_config.json"):
        file = Path(checkpoint, name)
        if not Path(checkpoint).is_dir():
            from transformers.utils import cached_file

            repository, revision = name_and_revision(checkpoint)
            try:
                file = Path(str(cached_file(repository, name, revision=revision)))
            except OSError:  # the checkpoint has no such file
                continue
        if file.is_file() and json.loads(file.read_text("utf-8")).get("auto_map"):
            raise UntrustedCodeError(
                f"{name} of {checkpoint} names code of its own, which NeMo-RL would run: read "
                "that code and set rod.trust_remote_code=true, or take a checkpoint without it."
            )
