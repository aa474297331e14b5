"""Plain torch for the kernels that hybrid models use from flash-linear-attention and mamba_ssm.

Shapes: B samples, S positions, H heads of P channels, G groups of heads that share N states.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F

_RUN = 64  # positions that the state space recurrence processes at once


def fla() -> dict[str, types.ModuleType]:
    """Returns the part of flash-linear-attention that Megatron's GatedDeltaNet imports."""
    return _modules(
        {
            "fla": {},
            "fla.modules": {},
            "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
            "fla.modules.l2norm": {"l2norm": l2norm},
            "fla.ops": {},
            "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        }
    )


def mamba_ssm() -> dict[str, types.ModuleType]:
    """Returns the part of mamba_ssm that Megatron's MambaMixer imports."""
    ops = "mamba_ssm.ops.triton"
    return _modules(
        {
            "mamba_ssm": {"__version__": "2.2.6"},
            "mamba_ssm.ops": {},
            ops: {},
            f"{ops}.layernorm_gated": {"RMSNorm": GatedRMSNorm},
            f"{ops}.ssd_combined": {
                "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
                "mamba_chunk_scan_combined": _for_inference,
            },
            f"{ops}.selective_state_update": {"selective_state_update": None},
        }
    )


def _modules(contents: dict[str, dict[str, Any]]) -> dict[str, types.ModuleType]:
    modules = {name: types.ModuleType(name) for name in contents}
    for name, members in contents.items():
        vars(modules[name]).update(members, __path__=[])
    return modules


def _for_inference(*_: Any, **__: Any) -> None:
    raise NotImplementedError("Generating text needs the kernels of mamba_ssm: install it.")


# flash-linear-attention


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    """Scales vectors to unit length."""
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Convolves every channel of x `[B, S, D]` with its own past by weight `[D, W]`."""
    past = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    y = F.conv1d(past, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    return (F.silu(y) if activation in ("silu", "swish") else y), None


def chunk_gated_delta_rule(*args: Any, **options: Any) -> Any:
    """Calls Megatron's own torch version of the gated delta rule, under its name in fla."""
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    options.pop("cu_seqlens", None)  # none without packed sequences
    return torch_chunk_gated_delta_rule(*args, **options)


# mamba_ssm


class GatedRMSNorm(torch.nn.Module):
    """RMS norm over groups of channels of y `[..., D]`, in fp32, gated by silu(z) if z is given."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, y: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the normalised y, in its dtype."""
        gate = 1.0 if z is None else F.silu(z.float())
        x = y.float() if self.norm_before_gate else y.float() * gate
        groups = x.unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        x = groups.flatten(-2) * self.weight.float()
        return (x * gate if self.norm_before_gate else x).to(y.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    headdim: int | None = None,
    ngroups: int = 1,
    seq_idx: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Computes Mamba 2 from the projected input to the gated output, without the norm.

    The input `[B, S, 2 H P + 2 G N + H]` is gate, input, input map, output map and step sizes; the
    output is `[B, S, H P]`. The skip connection's weight D is `[H, P]`, or `[H]` with `headdim`.
    The result does not depend on `chunk_size`.
    """
    if seq_idx is not None:
        raise NotImplementedError("Packed samples need the kernels of mamba_ssm: install it.")
    heads, headdim = len(A), headdim or D.shape[-1]
    inner, convolved = heads * headdim, len(conv1d_weight)
    z, xbc, dt = zxbcdt.split([inner, convolved, heads], -1)
    xbc, _none = causal_conv1d(xbc, conv1d_weight, conv1d_bias, "silu")
    x, b, c = xbc.split([inner, (convolved - inner) // 2, (convolved - inner) // 2], -1)
    x, z = x.unflatten(-1, (heads, headdim)), z.unflatten(-1, (heads, headdim))
    dt = F.softplus(dt.float() + dt_bias.float())
    b, c = (_to_heads(part, heads, ngroups) for part in (b, c))
    y = state_space_scan(x.float() * dt[..., None], dt * A, b, c)
    y = y + x.float() * (D if D.dim() == 2 else D[:, None]).float()
    return (y * F.silu(z.float())).flatten(-2).to(zxbcdt.dtype)


def _to_heads(part: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """Expands groups to heads: `[B, S, G N]` -> float32 `[B, S, H, N]`."""
    return part.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2).float()


def state_space_scan(
    x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """Computes h_t = exp(log_decay_t) h_(t-1) + x_t b_t' and y_t = h_t c_t, run by run.

    All are float32: x and y `[B, S, H, P]`, b and c `[B, S, H, N]`, and log_decay `[B, S, H]`,
    which is not positive.
    """
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    outputs = []
    for x_r, a_r, b_r, c_r in zip(*(t.split(_RUN, 1) for t in (x, log_decay, b, c)), strict=True):
        total = a_r.cumsum(1)  # decay since the start of the run
        # between[t, s]: decay from after s up to t; the future contributes nothing
        between = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2)
        past = torch.ones(between.shape[-2:], dtype=torch.bool, device=x.device).tril()
        between = between.masked_fill(~past, float("-inf")).exp()
        within = torch.einsum("bthn,bshn,bhts,bshp->bthp", c_r, b_r, between, x_r)
        before = torch.einsum("bthn,bhpn,bth->bthp", c_r, state, total.exp())
        outputs.append(within + before)
        rest = (total[:, -1:] - total).exp()  # decay up to the end of the run
        state = state * total[:, -1].exp()[..., None, None]
        state = state + torch.einsum("bshn,bshp,bsh->bhpn", b_r, x_r, rest)
    return torch.cat(outputs, 1)
