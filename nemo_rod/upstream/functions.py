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
from typing import Literal, NamedTuple

Use = Literal["called", "wrapped", "replaced", "read"]

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
        tested: whole signatures where they are more specific, one per variant.
        optional: whether some versions lack the function, and nemo_rod then works without it.
    """

    where: str
    use: Use
    roads: tuple[str, ...]
    relies_on: str = ""
    tested: tuple[str, ...] = ()
    optional: bool = False

    @property
    def package(self) -> str:
        """Package of the function, a key of `_PACKAGES`."""
        name = self.where.replace(":", ".")
        return next(root for root in _PACKAGES if name.startswith(f"{root}."))

    @property
    def signatures(self) -> tuple[str, ...]:
        """Tested parameters, one text per variant."""
        return self.tested or (self.relies_on,)

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

    Raises:
        ValueError: a function of these roads differs; the message names the first one, what was
            found and what to install.
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
    """Returns function, use, roads, tested and installed parameters of a road, or of "all"."""
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
_PIPELINED = f"{_SCHEDULE}, p2p_communicator"
_STEP = (
    "forward_step_func, data_iterator, model, optimizer, scheduler, global_state, pg_collection, "
    "forward_backward_func"
)
_LOADER = (
    "dataset, consumed_samples, dataloader_type, micro_batch_size, num_workers, data_sharding, "
    "worker_init_fn, collate_fn, pin_memory, persistent_workers, data_parallel_rank, "
    "data_parallel_size, drop_last, global_batch_size"
)

_CORE, _BRIDGE, _LM, _NEMO = "megatron.core", "megatron.bridge", "megatron.training", "nemo"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_LANGUAGE_MODULE = f"{_CORE}.models.common.language_module.language_module:LanguageModule"
_BUILDER = f"{_CORE}.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder"
_MOE, _TENSOR = f"{_CORE}.transformer.moe", f"{_CORE}.tensor_parallel"
_OPTIMIZER = f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer"
_LOADERS, _TRAINING = f"{_BRIDGE}.data.loaders", f"{_BRIDGE}.training"
_AUTO, _PROVIDER = f"{_BRIDGE}:AutoBridge", f"{_BRIDGE}.models.model_provider:ModelProviderMixin"
_CALLBACK = f"{_TRAINING}.callbacks:Callback"
_PRE_TRAINING = f"{_NEMO}.collections.llm.gpt.data.pre_training:PreTrainingDataModule"
_SAMPLER = f"{_NEMO}.lightning.pytorch.plugins:MegatronDataSampler"

# roads -> use -> function -> what is relied on
_LISTED: dict[str, dict[Use, dict[str, str]]] = {
    # a forward pass of blocks
    "scoring": {
        "called": {
            f"{_SCHEDULES}:get_forward_backward_func": "",
            f"{_SCHEDULES}:forward_backward_no_pipelining": _SCHEDULE,
            f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving": _PIPELINED,
            f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving": _PIPELINED,
            f"{_CORE}.pipeline_parallel.p2p_communication:P2PCommunicator": "*, pp_group, config",
            f"{_CORE}.utils:get_model_config": "model",
            f"{_TENSOR}.random:get_cuda_rng_tracker": "",
            f"{_TENSOR}.mappings:gather_from_sequence_parallel_region": "input_, *, group",
            f"{_CORE}.models.gpt.gpt_model:GPTModel.forward": (
                "self, *, input_ids, position_ids, attention_mask, labels"
            ),
            f"{_CORE}.process_groups_config:ProcessGroupCollection.use_mpu_process_groups": "",
        },
        "wrapped": {
            f"{_TENSOR}.layers:ColumnParallelLinear.forward": "self, input_, *, weight",
        },
        "replaced": {f"{_LANGUAGE_MODULE}.compute_language_model_loss": "self, labels, logits"},
    },
    # jobs of our own in Megatron-Bridge
    "trainer": {
        "called": {
            f"{_CORE}.parallel_state:is_initialized": "",
            f"{_TRAINING}.pretrain:pretrain": "config, forward_step_func, *, callbacks",
            f"{_TRAINING}.utils.pg_utils:get_pg_collection": "model",
            f"{_TRAINING}.utils.flop_utils:num_floating_point_operations": "cfg, batch_size",
            f"{_TRAINING}.checkpointing:_load_model_weights_from_checkpoint": (
                "checkpoint_path, model"
            ),
            f"{_AUTO}.from_hf_pretrained": "path",
            f"{_AUTO}.to_megatron_provider": "self, *, load_weights",
            f"{_AUTO}.save_hf_pretrained": "self, model, path, *, show_progress, strict",
            f"{_PROVIDER}.initialize_model_parallel": "self, *, seed",
            f"{_PROVIDER}.provide_distributed_model": "self, *, wrap_with_ddp",
        },
        "replaced": {
            f"{_TRAINING}.config:DatasetProvider.build_datasets": "self, context",
            f"{_CALLBACK}.on_train_start": "self, context",
            f"{_CALLBACK}.on_train_step_start": "self, context",
            f"{_CALLBACK}.on_train_step_end": "self, context",
            f"{_CALLBACK}.on_train_end": "self, context",
        },
        "read": {
            f"{_TRAINING}.callbacks:CallbackContext": (
                "*, state, model, optimizer, scheduler, loss_dict, grad_norm"
            ),
        },
    },
    "trainer swap_in/megatron_bridge": {
        "wrapped": {
            f"{_TRAINING}.train:train_step": (
                "*, global_state, pg_collection, forward_backward_func"
            ),
        },
    },
    # other people's jobs in Megatron-Bridge
    "swap_in/megatron_bridge": {
        "replaced": {f"{_LOADERS}:get_train_valid_test_num_samples": "cfg"},
        "wrapped": {
            f"{_LOADERS}:build_train_valid_test_datasets": "",
            f"{_LOADERS}:build_pretraining_data_loader": "*, dataset, consumed_samples",
        },
        "called": {
            f"{_TRAINING}.setup:setup": "state, train_valid_test_datasets_provider",
            f"{_BRIDGE}.data.utils:get_dataset_provider": "dataset_config",
            f"{_TRAINING}.config:runtime_config_update": "cfg",
            f"{_TRAINING}.initialize:destroy_global_state": "",
            f"{_TRAINING}.utils.train_utils:prepare_forward_step_func": "forward_step_func, state",
            f"{_TRAINING}.utils.checkpoint_utils:checkpoint_exists": "checkpoints_path",
        },
    },
    # other people's jobs in Megatron-LM
    "swap_in/megatron_lm": {
        "wrapped": {
            f"{_LM}.training:initialize_megatron": "",
            f"{_LM}.training:build_train_valid_test_datasets": "",
            f"{_LM}.training:train_step": "*, data_iterator, forward_backward_func",
            f"{_BUILDER}.__init__": "*, is_built_on_rank",
        },
        "replaced": {
            f"{_LM}.training:get_train_valid_test_num_samples": "",
            f"{_LM}.training:build_pretraining_data_loader": "dataset, consumed_samples, ...",
            f"{_LM}.training:train": "forward_step_func, model, ...",
        },
        "called": {f"{_LM}.checkpointing:checkpoint_exists": "checkpoints_path"},
    },
    # other people's jobs in NeMo 2
    "swap_in/nemo2": {
        "wrapped": {
            f"{_PRE_TRAINING}.build": "self, trainer_max_steps, trainer_val_check_interval",
            f"{_SAMPLER}.transform_dataloader": "self, dataloader",
        },
        "called": {f"{_NEMO}.collections.llm:pretrain": "model, data, trainer, *, log, resume"},
    },
    "swap_in/megatron_bridge swap_in/megatron_lm swap_in/nemo2": {
        "called": {f"{_CORE}.utils:unwrap_model": "model"},
    },
    # a machine without CUDA
    "cpu": {
        "replaced": {
            f"{_TENSOR}.random:_set_cuda_rng_state": "new_state, device, graph_safe",
            f"{_MOE}.moe_utils:maybe_move_tensor_to_cpu": "tensor, as_numpy, record_stream",
            f"{_MOE}.token_dispatcher:maybe_move_tensor_to_cpu": "tensor, as_numpy, record_stream",
        },
    },
    "cpu/megatron_bridge": {
        "wrapped": {
            f"{_TRAINING}.setup:initialize_megatron": "*, allow_no_cuda",
            f"{_TRAINING}.initialize:_set_random_seed": "",
        },
        "replaced": {f"{_TRAINING}.initialize:compile_helpers": ""},
    },
    "cpu/megatron_lm": {
        "wrapped": {
            f"{_LM}.training:initialize_megatron": "*, allow_no_cuda",
            f"{_LM}.initialize:_set_random_seed": "",
            f"{_LM}.initialize:_initialize_distributed": "",
        },
        "replaced": {
            f"{_LM}.arguments:get_device_arch_version": "",
            "megatron.legacy.fused_kernels:load": "args",
            f"{_CORE}.datasets.utils:compile_helpers": "",
        },
    },
    "cpu/nemo2": {
        "wrapped": {f"{_NEMO}.lightning.megatron_init:_set_random_seed": ""},
        "replaced": {
            f"{_NEMO}.lightning.io.pl:_fix_tensors_device": "ckpt",
            f"{_NEMO}.lightning.pytorch.callbacks:ProgressPrinter.log_megatron_timers": "self, ...",
        },
    },
    # a machine without TransformerEngine
    "plain": {
        "wrapped": {
            f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__": "cls, config",
            f"{_OPTIMIZER}.sharded_state_dict": "self, model_sharded_state_dict, is_loading",
        },
        "replaced": {
            f"{_OPTIMIZER}.load_state_dict": "self, state_dict",
            f"{_OPTIMIZER}._set_main_param_and_optimizer_states": "self, model_param, tensors",
        },
        "called": {f"{_OPTIMIZER}._init_optimizer_states_with_dummy_values": "self"},
    },
    "plain/megatron_bridge": {
        "replaced": {
            f"{_BRIDGE}.models.conversion.model_bridge:_megatron_local_name_to_global": (
                "models, config, param_name, vp_stage"
            ),
            f"{_BRIDGE}.models.conversion.param_mapping:get_module_and_param_from_name": (
                "models, param_name, vp_stage"
            ),
        },
    },
}
# function -> whole signatures, one per variant
_TESTED: dict[str, tuple[str, ...]] = {
    # the step makes its communicator, or is given one
    f"{_TRAINING}.train:train_step": (_STEP, f"{_STEP}, p2p_communicator"),
    f"{_LOADERS}:build_train_valid_test_datasets": (
        "cfg, build_train_valid_test_datasets_provider",
    ),
    # shuffled by torch's seed, or by a seed of its own
    f"{_LOADERS}:build_pretraining_data_loader": (_LOADER, f"{_LOADER}, seed"),
    f"{_BUILDER}.__init__": ("self, cls, sizes, is_built_on_rank, config",),
}
_OPTIONAL = {"megatron.legacy.fused_kernels:load"}

FUNCTIONS = tuple(
    Function(where, use, (*roads.split(),), relied, _TESTED.get(where, ()), where in _OPTIONAL)
    for roads, uses in _LISTED.items()
    for use, listed in uses.items()
    for where, relied in listed.items()
)
ROADS = tuple(dict.fromkeys(road for roads in _LISTED for road in roads.split()))
