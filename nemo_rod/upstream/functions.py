"""Functions of NVIDIA's that nemo_rod calls by position, wraps or replaces, as they were tested.

A moved parameter fails silently: megatron-core 0.18 put a switch where a function that cuts batches
used to take its process group, and every rank cut by the whole world. Each road therefore calls
`check` first, and runs only if the functions still match the tested ones.

The use of a function is written like a call: names before `*` are passed by position, names after
it by keyword, and `...` stands for any further parameters.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Literal, NamedTuple

Use = Literal["called", "wrapped", "replaced", "read"]

# paths through nemo_rod; cpu: machines without CUDA; plain: machines without TransformerEngine
ROADS = (
    "scoring",
    "trainer",
    "swap_in/megatron_bridge",
    "swap_in/megatron_lm",
    "swap_in/nemo2",
    "cpu",
    "cpu/megatron_bridge",
    "cpu/megatron_lm",
    "cpu/nemo2",
    "plain",
    "plain/megatron_bridge",
)
# prefix of a module's name -> name of the package, and the versions to install
_PACKAGES = {
    "megatron.core": ("megatron-core", "0.16.1 to 0.19.2"),
    "megatron.bridge": ("Megatron-Bridge", "0.3.1 to 0.6.2"),
    "megatron.training": ("Megatron-LM", "core_v0.16.1, core_v0.19.0 or main of August 2026"),
    "megatron.legacy": ("Megatron-LM", "core_v0.16.1, core_v0.19.0 or main of August 2026"),
    "nemo": ("nemo-toolkit", "2.7"),
}


class Function(NamedTuple):
    """One function, method or class, and the requirements on its parameters.

    Attributes:
        where: location of the function, `module:name`.
        use: "called": with only the arguments in `relies_on`; "wrapped": called with its callers'
            arguments, of which `relies_on` is read or set; "replaced": by a function that takes
            exactly `relies_on`; "read": an object passed to us that has these fields.
        roads: roads that use the function, of `ROADS`.
        relies_on: parameters that nemo_rod relies on; see the docstring of this module.
        tested: whole signatures where they are more specific, by what distinguishes them.
        optional: whether some versions lack the function, and nemo_rod then works without it.
    """

    where: str
    use: Use
    roads: tuple[str, ...]
    relies_on: str = ""
    tested: Mapping[str, str] = {}
    optional: bool = False

    @property
    def package(self) -> str:
        """Package of the function, a key of `_PACKAGES`."""
        name = self.where.replace(":", ".")
        return next(root for root in _PACKAGES if name.startswith(f"{root}."))

    @property
    def signatures(self) -> list[str]:
        """Tested parameters, one text per variant."""
        return [*self.tested.values()] or [self.relies_on]

    def found(self) -> inspect.Signature | None:
        """Returns the installed signature; None if there is no such function."""
        module, _, path = self.where.partition(":")
        try:
            target = importlib.import_module(module)
            for name in path.split("."):
                target = getattr(target, name)
            return inspect.signature(target)  # type: ignore[arg-type]
        except (AttributeError, TypeError):
            return None
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # a dependency of NVIDIA's package is missing, not the package itself
            return None

    def fits(self, found: inspect.Signature) -> bool:
        """Returns whether nemo_rod's use of the function still matches its signature."""
        before, _, behind = self.relies_on.partition("*")
        by_place, by_name = _names(before), _names(behind)
        kinds = {name: parameter.kind for name, parameter in found.parameters.items()}
        if self.use == "replaced" and "..." not in by_place:
            return [*kinds] == by_place[: len(kinds)]
        if inspect.Parameter.VAR_POSITIONAL in kinds.values():
            return True  # a decorator hides the parameters: nothing can be checked
        by_place = [name for name in by_place if name != "..."]
        places = [name for name, kind in kinds.items() if kind != inspect.Parameter.KEYWORD_ONLY]
        if places[: len(by_place)] != by_place or not {*by_name} <= {*kinds}:
            return False
        return self.use != "called" or _needed(found) <= {*by_place, *by_name}

    def problem(self) -> str | None:
        """Returns one sentence if the installed function differs from the tested one."""
        found = self.found()
        if self.optional if found is None else self.fits(found):
            return None
        name, versions = _PACKAGES[self.package]
        said = "is not there" if found is None else f"takes ({', '.join(found.parameters)})"
        return (
            f"{self.where.replace(':', '.')} {said} in {name} {_version(self.package)}: expected "
            f"({') or ('.join(self.signatures)}), with which nemo_rod was tested; install {name} "
            f"{versions}, or a newer nemo_rod."
        )


def check(*roads: str) -> None:
    """Refuses an installation whose functions differ from the tested ones.

    Args:
        roads: roads that are about to run, of `ROADS`.

    Raises:
        ValueError: a function differs; the message names the first one, what was found and what to
            install.
    """
    for road in roads:
        for function in of_road(road):
            if problem := function.problem():
                raise ValueError(problem)


def of_road(road: str) -> list[Function]:
    """Returns the functions that a road uses."""
    assert road in ROADS, road
    return [function for function in FUNCTIONS if road in function.roads]


def counts() -> str:
    """Returns the number of functions of each road available on this machine, as text.

    Raises:
        ValueError: one of the functions differs from the tested one.
    """
    import torch

    roads = ["scoring", "trainer", "swap_in/megatron_bridge"]
    if not torch.cuda.is_available():
        roads += ["cpu", "cpu/megatron_bridge"]
    if importlib.util.find_spec("transformer_engine") is None:
        roads += ["plain", "plain/megatron_bridge"]
    check(*roads)
    return ", ".join(f"{road} {len(of_road(road))}" for road in roads)


def rows(road: str) -> list[list[str]]:
    """Returns function, use, roads, tested and installed parameters of a road's functions.

    Args:
        road: name of a road, one of `ROADS`, or "all".
    """
    chosen = FUNCTIONS if road == "all" else of_road(road)
    return [
        [
            function.where,
            function.use,
            " ".join(function.roads),
            " or ".join(f"({text})" for text in function.signatures),
            _installed(function),
        ]
        for function in chosen
    ]


def _installed(function: Function) -> str:
    try:
        found, problem = function.found(), function.problem()
    except ImportError:  # the package or one of its dependencies is missing
        return "-"
    text = "not there" if found is None else f"({', '.join(found.parameters)})"
    return text if problem is None else f"NO: {text}"


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _needed(found: inspect.Signature) -> set[str]:
    """Returns the required parameters of a signature."""
    return {
        name
        for name, parameter in found.parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind != inspect.Parameter.VAR_KEYWORD
    }


def _version(package: str) -> str:
    root = "megatron.core" if package in ("megatron.training", "megatron.legacy") else package
    return getattr(importlib.import_module(root), "__version__", "of an unknown version")


_SCHEDULE = (
    "*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
    "forward_only, collect_non_loss_data, pg_collection"
)
_STEP = (
    "forward_step_func, data_iterator, model, optimizer, scheduler, global_state, pg_collection, "
    "forward_backward_func"
)
_LOADER = (
    "dataset, consumed_samples, dataloader_type, micro_batch_size, num_workers, data_sharding, "
    "worker_init_fn, collate_fn, pin_memory, persistent_workers, data_parallel_rank, "
    "data_parallel_size, drop_last, global_batch_size"
)
_EXPERTS = "models, config, param_name, vp_stage"

_CORE, _BRIDGE, _TRAINING = "megatron.core", "megatron.bridge", "megatron.training"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_OPTIMIZER = f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer"
_CALLBACK = f"{_BRIDGE}.training.callbacks:Callback"

SCORING, TRAINER, CPU = ("scoring",), ("trainer",), ("cpu",)
ON_BRIDGE, ON_LM, ON_NEMO = (
    ("swap_in/megatron_bridge",),
    ("swap_in/megatron_lm",),
    ("swap_in/nemo2",),
)
PLAIN, PLAIN_BRIDGE = ("plain",), ("plain/megatron_bridge",)
CPU_BRIDGE, CPU_LM, CPU_NEMO = ("cpu/megatron_bridge",), ("cpu/megatron_lm",), ("cpu/nemo2",)

FUNCTIONS = (
    # a forward pass of blocks
    Function(f"{_SCHEDULES}:get_forward_backward_func", "called", SCORING),
    Function(f"{_SCHEDULES}:forward_backward_no_pipelining", "called", SCORING, _SCHEDULE),
    Function(
        f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
        "called",
        SCORING,
        f"{_SCHEDULE}, p2p_communicator",
    ),
    Function(
        f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving",
        "called",
        SCORING,
        f"{_SCHEDULE}, p2p_communicator",
    ),
    Function(
        f"{_CORE}.pipeline_parallel.p2p_communication:P2PCommunicator",
        "called",
        SCORING,
        "*, pp_group, config",
    ),
    Function(f"{_CORE}.utils:get_model_config", "called", SCORING, "model"),
    Function(f"{_CORE}.tensor_parallel.random:get_cuda_rng_tracker", "called", SCORING),
    Function(
        f"{_CORE}.tensor_parallel.mappings:gather_from_sequence_parallel_region",
        "called",
        SCORING,
        "input_, *, group",
    ),
    Function(
        f"{_CORE}.tensor_parallel.layers:ColumnParallelLinear.forward",
        "wrapped",
        SCORING,
        "self, input_, *, weight",
    ),
    Function(
        f"{_CORE}.models.common.language_module.language_module:"
        "LanguageModule.compute_language_model_loss",
        "replaced",
        SCORING,
        "self, labels, logits",
    ),
    Function(
        f"{_CORE}.models.gpt.gpt_model:GPTModel.forward",
        "called",
        SCORING,
        "self, *, input_ids, position_ids, attention_mask, labels",
    ),
    Function(
        f"{_CORE}.process_groups_config:ProcessGroupCollection.use_mpu_process_groups",
        "called",
        SCORING,
    ),
    Function(f"{_CORE}.parallel_state:is_initialized", "called", TRAINER),
    # jobs of our own in Megatron-Bridge
    Function(
        f"{_BRIDGE}.training.train:train_step",
        "wrapped",
        (*TRAINER, *ON_BRIDGE),
        "*, global_state, pg_collection, forward_backward_func",
        {"communicator made in the step": _STEP, "and given to it": f"{_STEP}, p2p_communicator"},
    ),
    Function(
        f"{_BRIDGE}.training.pretrain:pretrain",
        "called",
        TRAINER,
        "config, forward_step_func, *, callbacks",
    ),
    Function(f"{_BRIDGE}.training.utils.pg_utils:get_pg_collection", "called", TRAINER, "model"),
    Function(
        f"{_BRIDGE}.training.utils.flop_utils:num_floating_point_operations",
        "called",
        TRAINER,
        "cfg, batch_size",
    ),
    Function(
        f"{_BRIDGE}.training.checkpointing:_load_model_weights_from_checkpoint",
        "called",
        TRAINER,
        "checkpoint_path, model",
    ),
    Function(f"{_BRIDGE}:AutoBridge.from_hf_pretrained", "called", TRAINER, "path"),
    Function(
        f"{_BRIDGE}:AutoBridge.to_megatron_provider", "called", TRAINER, "self, *, load_weights"
    ),
    Function(
        f"{_BRIDGE}:AutoBridge.save_hf_pretrained",
        "called",
        TRAINER,
        "self, model, path, *, show_progress, strict",
    ),
    Function(
        f"{_BRIDGE}.models.model_provider:ModelProviderMixin.initialize_model_parallel",
        "called",
        TRAINER,
        "self, *, seed",
    ),
    Function(
        f"{_BRIDGE}.models.model_provider:ModelProviderMixin.provide_distributed_model",
        "called",
        TRAINER,
        "self, *, wrap_with_ddp",
    ),
    Function(
        f"{_BRIDGE}.training.config:DatasetProvider.build_datasets",
        "replaced",
        TRAINER,
        "self, context",
    ),
    Function(f"{_CALLBACK}.on_train_start", "replaced", TRAINER, "self, context"),
    Function(f"{_CALLBACK}.on_train_step_start", "replaced", TRAINER, "self, context"),
    Function(f"{_CALLBACK}.on_train_step_end", "replaced", TRAINER, "self, context"),
    Function(f"{_CALLBACK}.on_train_end", "replaced", TRAINER, "self, context"),
    Function(
        f"{_BRIDGE}.training.callbacks:CallbackContext",
        "read",
        TRAINER,
        "*, state, model, optimizer, scheduler, loss_dict, grad_norm",
    ),
    # other people's jobs in Megatron-Bridge
    Function(
        f"{_BRIDGE}.data.loaders:get_train_valid_test_num_samples", "replaced", ON_BRIDGE, "cfg"
    ),
    Function(
        f"{_BRIDGE}.data.loaders:build_train_valid_test_datasets",
        "wrapped",
        ON_BRIDGE,
        "",
        {"": "cfg, build_train_valid_test_datasets_provider"},
    ),
    Function(
        f"{_BRIDGE}.data.loaders:build_pretraining_data_loader",
        "wrapped",
        ON_BRIDGE,
        "*, dataset, consumed_samples",
        {"shuffled by torch's seed": _LOADER, "by a seed of its own": f"{_LOADER}, seed"},
    ),
    Function(
        f"{_BRIDGE}.training.setup:setup",
        "called",
        ON_BRIDGE,
        "state, train_valid_test_datasets_provider",
    ),
    Function(f"{_BRIDGE}.data.utils:get_dataset_provider", "called", ON_BRIDGE, "dataset_config"),
    Function(f"{_BRIDGE}.training.config:runtime_config_update", "called", ON_BRIDGE, "cfg"),
    Function(f"{_BRIDGE}.training.initialize:destroy_global_state", "called", ON_BRIDGE),
    Function(
        f"{_BRIDGE}.training.utils.train_utils:prepare_forward_step_func",
        "called",
        ON_BRIDGE,
        "forward_step_func, state",
    ),
    Function(
        f"{_BRIDGE}.training.utils.checkpoint_utils:checkpoint_exists",
        "called",
        ON_BRIDGE,
        "checkpoints_path",
    ),
    # other people's jobs in Megatron-LM
    Function(f"{_TRAINING}.training:initialize_megatron", "wrapped", ON_LM),
    Function(f"{_TRAINING}.training:get_train_valid_test_num_samples", "replaced", ON_LM),
    Function(f"{_TRAINING}.training:build_train_valid_test_datasets", "wrapped", ON_LM),
    Function(
        f"{_TRAINING}.training:build_pretraining_data_loader",
        "replaced",
        ON_LM,
        "dataset, consumed_samples, ...",
    ),
    Function(
        f"{_TRAINING}.training:train_step",
        "wrapped",
        ON_LM,
        "*, data_iterator, forward_backward_func",
    ),
    Function(f"{_TRAINING}.training:train", "replaced", ON_LM, "forward_step_func, model, ..."),
    Function(f"{_TRAINING}.checkpointing:checkpoint_exists", "called", ON_LM, "checkpoints_path"),
    Function(
        f"{_CORE}.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
        "wrapped",
        ON_LM,
        "*, is_built_on_rank",
        {"": "self, cls, sizes, is_built_on_rank, config"},
    ),
    # other people's jobs in NeMo 2
    Function(
        "nemo.collections.llm.gpt.data.pre_training:PreTrainingDataModule.build",
        "wrapped",
        ON_NEMO,
        "self, trainer_max_steps, trainer_val_check_interval",
    ),
    Function(
        "nemo.lightning.pytorch.plugins:MegatronDataSampler.transform_dataloader",
        "wrapped",
        ON_NEMO,
        "self, dataloader",
    ),
    Function(
        "nemo.collections.llm:pretrain", "called", ON_NEMO, "model, data, trainer, *, log, resume"
    ),
    Function(f"{_CORE}.utils:unwrap_model", "called", (*ON_BRIDGE, *ON_LM, *ON_NEMO), "model"),
    # a machine without CUDA
    Function(
        f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state",
        "replaced",
        CPU,
        "new_state, device, graph_safe",
    ),
    *(
        Function(
            f"{_CORE}.transformer.moe.{module}:maybe_move_tensor_to_cpu",
            "replaced",
            CPU,
            "tensor, as_numpy, record_stream",
        )
        for module in ("moe_utils", "token_dispatcher")
    ),
    Function(
        f"{_BRIDGE}.training.setup:initialize_megatron", "wrapped", CPU_BRIDGE, "*, allow_no_cuda"
    ),
    Function(f"{_BRIDGE}.training.initialize:_set_random_seed", "wrapped", CPU_BRIDGE),
    Function(f"{_BRIDGE}.training.initialize:compile_helpers", "replaced", CPU_BRIDGE),
    Function(f"{_TRAINING}.training:initialize_megatron", "wrapped", CPU_LM, "*, allow_no_cuda"),
    Function(f"{_TRAINING}.initialize:_set_random_seed", "wrapped", CPU_LM),
    Function(f"{_TRAINING}.initialize:_initialize_distributed", "wrapped", CPU_LM),
    Function(f"{_TRAINING}.arguments:get_device_arch_version", "replaced", CPU_LM),
    Function("megatron.legacy.fused_kernels:load", "replaced", CPU_LM, "args", optional=True),
    Function(f"{_CORE}.datasets.utils:compile_helpers", "replaced", CPU_LM),
    Function("nemo.lightning.megatron_init:_set_random_seed", "wrapped", CPU_NEMO),
    Function("nemo.lightning.io.pl:_fix_tensors_device", "replaced", CPU_NEMO, "ckpt"),
    Function(
        "nemo.lightning.pytorch.callbacks:ProgressPrinter.log_megatron_timers",
        "replaced",
        CPU_NEMO,
        "self, ...",
    ),
    # no TransformerEngine
    Function(
        f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__", "wrapped", PLAIN, "cls, config"
    ),
    Function(
        f"{_OPTIMIZER}.sharded_state_dict",
        "wrapped",
        PLAIN,
        "self, model_sharded_state_dict, is_loading",
    ),
    Function(f"{_OPTIMIZER}.load_state_dict", "replaced", PLAIN, "self, state_dict"),
    Function(
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        "replaced",
        PLAIN,
        "self, model_param, tensors",
    ),
    Function(f"{_OPTIMIZER}._init_optimizer_states_with_dummy_values", "called", PLAIN, "self"),
    Function(
        f"{_BRIDGE}.models.conversion.model_bridge:_megatron_local_name_to_global",
        "replaced",
        PLAIN_BRIDGE,
        _EXPERTS,
    ),
)
