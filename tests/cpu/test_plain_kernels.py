"""The stand-ins for GPU kernels and fused layers, against Hugging Face's torch code.

Lengths that the runs of 64 positions do not divide are among them. Gradients are compared by the
product with one random tensor, for every input. What computes in fp32 computes in fp64 here, where
rounding hides nothing.
"""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("transformers.models.qwen3_5") is None:
    pytest.skip("this transformers has no Qwen3.5 and no Nemotron-H", allow_module_level=True)
if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron is not installed", allow_module_level=True)

from architectures import NEMOTRON  # noqa: E402
from places import Later  # noqa: E402

nemotron = Later("transformers.models.nemotron_h.modeling_nemotron_h")
qwen = Later("transformers.models.qwen3_5.modeling_qwen3_5")
kernels, layers = Later("nemo_rod.cpu.plain.kernels"), Later("nemo_rod.cpu.plain.layers")
LENGTHS = [1, 63, 64, 100, 192]
NO_STATE = {"initial_state": None, "output_final_state": False}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


@pytest.fixture(autouse=True)
def fp64():
    assert all(module.torch for module in (nemotron, qwen, kernels, layers))  # are imported
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def assert_same(ours: Callable, theirs: Callable, *inputs: torch.Tensor) -> None:
    """Both give the same, and the same gradients, to a share of the largest value."""
    results = []
    for function in (ours, theirs):
        output = function(*inputs)
        weights = random(*output.shape, seed=99).detach()
        gradients = torch.autograd.grad((output * weights).sum(), inputs)
        results.append([output.detach(), *gradients])
    for one, other in zip(*results, strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * largest)


@pytest.mark.parametrize("length", LENGTHS)
def test_mamba_is_hugging_faces(length):
    config = transformers.NemotronHConfig(**NEMOTRON, hybrid_override_pattern="M")
    torch.manual_seed(0)
    mixer = nemotron.NemotronHMamba2Mixer(config, layer_idx=0).double()
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    norm = kernels.GatedRMSNorm(
        mixer.intermediate_size,
        eps=config.layer_norm_epsilon,
        group_size=mixer.intermediate_size // mixer.n_groups,
        norm_before_gate=False,
    )
    norm.weight = mixer.norm.weight
    inputs = (random(2, length, 32), *mixer.parameters())

    def ours(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = kernels.mamba_split_conv1d_scan_combined(
            mixer.in_proj(x), mixer.conv1d.weight[:, 0], mixer.conv1d.bias, mixer.dt_bias,
            -mixer.A_log.exp(), mixer.D, chunk_size=128, headdim=mixer.head_dim,
            ngroups=mixer.n_groups,
        )  # fmt: skip
        return mixer.out_proj(norm(y))

    assert_same(ours, lambda x, *_: mixer.torch_forward(x), *inputs)


@pytest.mark.parametrize("length", LENGTHS)
def test_gated_delta_rule_is_hugging_faces(length):
    q, k, v = (random(2, length, 4, 8, seed=seed) for seed in range(3))
    decay, beta = random(2, length, 4, seed=3), random(2, length, 4, seed=4)

    def by(rule: Callable, norm: Callable) -> Callable:
        def run(*inputs: torch.Tensor) -> torch.Tensor:
            q, k, v, decay, beta = inputs
            decay, beta = -torch.nn.functional.softplus(decay), beta.sigmoid()
            return rule(norm(q), norm(k), v, g=decay, beta=beta)[0]

        return run

    def step_by_step(*inputs: torch.Tensor, **gates: torch.Tensor) -> tuple:
        return qwen.torch_recurrent_gated_delta_rule(*inputs, **gates, **NO_STATE)

    ours = by(kernels.chunk_gated_delta_rule, kernels.l2norm)
    for rule in (qwen.torch_chunk_gated_delta_rule, step_by_step):
        assert_same(ours, by(rule, qwen.l2norm), q, k, v, decay, beta)


@pytest.mark.parametrize("length", [1, 2, 100])
def test_causal_convolution_is_torchs(length):
    convolution = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3).double()
    inputs = (random(2, length, 6), *convolution.parameters())
    assert_same(
        lambda x, weight, bias: kernels.causal_conv1d(x, weight[:, 0], bias, "silu")[0],
        lambda x, *_: torch.nn.functional.silu(
            convolution(x.transpose(1, 2))[..., :length].transpose(1, 2)
        ),
        *inputs,
    )


def test_gated_norm_before_the_gate_is_qwens():
    theirs, ours = qwen.Qwen3_5RMSNormGated(16), kernels.GatedRMSNorm(16, eps=1e-6)
    weight = random(16, seed=5)
    theirs.weight = ours.weight = torch.nn.Parameter(weight.detach().clone())
    inputs = (random(2, 7, 16), random(2, 7, 16, seed=1), theirs.weight)
    assert_same(lambda y, z, _: ours(y, z), lambda y, z, _: theirs(y, z), *inputs)


@pytest.mark.parametrize("centered", [True, False])
def test_norm_is_hugging_faces(centered):
    config = SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=centered,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )
    theirs = (qwen.Qwen3_5RMSNorm if centered else nemotron.NemotronHRMSNorm)(16, eps=1e-5)
    ours = layers.Norm(config, 16, 1e-5)
    assert torch.equal(ours.weight, theirs.weight)  # the same start
    ours.weight = theirs.weight = torch.nn.Parameter(random(16, seed=5).detach())
    inputs = (random(2, 7, 16), theirs.weight)
    assert_same(lambda x, _: ours(x), lambda x, _: theirs(x), *inputs)
