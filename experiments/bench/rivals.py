"""PyTorch's attention on the same inputs and masks, in the same process: SDPA (cuDNN, flash), FlexAttention, and serial dispatch.

Serial dispatch is how a mixed layer runs without a mixed kernel, and the paper's baseline (Algorithm 1a, Fig. 4): gather the full heads
and attend, gather the streaming heads and attend within their window, scatter both into the output.

Arrays reach PyTorch by DLPack, once per case and outside the timing, in its own layout [1, N, T, H]. PyTorch is optional: a missing one,
or one without the GPU that JAX has, is what `TorchSide` raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.implementations import Prepared
from experiments.bench.problem import Problem
from experiments.bench.timing import TorchCall


class TorchSide:
    """A problem's tensors and the rivals on them.

    Args:
      flex_options: `kernel_options` of FlexAttention; on a CPU it runs uncompiled, and they do nothing.

    Raises:
      ImportError: there is no PyTorch. RuntimeError: it does not see the GPU.
    """

    def __init__(self, problem: Problem, flex_options: dict[str, Any]):
        import torch

        self.cuda = jax.default_backend() == "gpu"
        if self.cuda and not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        self.problem, self.flex_options = problem, flex_options
        self.q, self.k, self.v, self.d_out = (_to_torch(x) for x in problem.arrays)
        self.group = problem.shape.heads // problem.shape.kv_heads

    def forward(self, name: str) -> Prepared:
        """`cudnn_torch` and `flash_torch` (dense), `flex_torch` (the plan's mask), `serial_cudnn` and `serial_flash`."""
        import torch

        notes: dict[str, Any] = {}
        if name in ("cudnn_torch", "flash_torch"):
            backend = name.removesuffix("_torch")
            notes["heads_expanded"] = not self._takes_groups(backend, gradient=False)
            k, v = self._keys(notes["heads_expanded"])
            run = lambda: self._sdpa(backend, self.q, k, v)
        elif name == "flex_torch":
            notes["kernel_options"] = self.flex_options
            mask = block_mask(np.repeat(self.problem.visible, self.group, axis=0), self.problem.sparsity.block_size, self.q.device)
            run = lambda: self._flex(self.q, self.k, self.v, mask)
        else:
            notes["kernel_options"] = self.flex_options
            run, notes["heads_expanded"] = self._serial(name.removeprefix("serial_"))

        def without_gradient() -> Any:
            with torch.no_grad():
                return run()

        return Prepared(TorchCall(without_gradient, self.cuda), lambda out: (_to_jax(out),), notes)

    def backward(self, name: str) -> Prepared:
        """The gradients alone, of `cudnn_torch`, `flash_torch` (dense) and `flex_torch`, from a forward pass whose graph is kept."""
        import torch

        notes: dict[str, Any] = {}
        if name == "flex_torch":
            notes["kernel_options"] = self.flex_options
            mask = block_mask(np.repeat(self.problem.visible, self.group, axis=0), self.problem.sparsity.block_size, self.q.device)
            attend, (k, v) = functools.partial(self._flex, mask=mask), (self.k, self.v)
        else:
            backend = name.removesuffix("_torch")
            notes["heads_expanded"] = not self._takes_groups(backend, gradient=True)
            attend, (k, v) = functools.partial(self._sdpa, backend), self._keys(notes["heads_expanded"])
        leaves = [x.detach().requires_grad_() for x in (self.q, k, v)]
        out = attend(*leaves)

        def to_jax(gradients: tuple[Any, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = (_to_jax(x) for x in gradients)
            fold = lambda x: x.reshape(*x.shape[:2], self.problem.shape.kv_heads, -1, x.shape[-1]).astype(jnp.float32).sum(3)
            return dq, fold(dk), fold(dv)

        return Prepared(TorchCall(lambda: torch.autograd.grad(out, leaves, self.d_out, retain_graph=True), self.cuda), to_jax, notes)

    def _keys(self, expanded: bool) -> tuple[Any, Any]:
        """K and V; once per query head where a backend does not take groups, before the clock starts and so to the rival's favour."""
        return (self.k.repeat_interleave(self.group, dim=1), self.v.repeat_interleave(self.group, dim=1)) if expanded else (self.k, self.v)

    def _takes_groups(self, backend: str, *, gradient: bool) -> bool:
        import torch

        if self.group == 1:
            return True
        q, k, v = (x[:, :, :256].clone().requires_grad_(gradient) for x in (self.q, self.k, self.v))
        try:
            out = self._sdpa(backend, q, k, v)
            if gradient:
                torch.autograd.grad(out, (q, k, v), out)
        except RuntimeError:
            return False
        return True

    def _sdpa(self, backend: str, q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel({"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def _flex(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        attend = _compiled_flex() if self.cuda else _eager_flex()
        return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=dict(self.flex_options))

    def _serial(self, backend: str) -> tuple[Callable[[], Any], bool]:
        """(one run over the layer's heads, whether the full heads' K and V are gathered once per query head)."""
        import torch

        problem, group = self.problem, self.group
        expand = not self._takes_groups(backend, gradient=False)
        index = lambda heads: torch.tensor(heads, device=self.q.device)
        queries = lambda heads: index([head * group + g for head in heads for g in range(group)])
        full, full_queries = index(problem.full_heads), queries(problem.full_heads)
        streaming, streaming_queries = index(problem.streaming_heads), queries(problem.streaming_heads)
        full_keys = full.repeat_interleave(group) if expand else full
        # All streaming heads have the same window, so its lists have one head, whatever the number that reads them.
        window = None
        if problem.streaming_heads:
            window = block_mask(problem.visible[problem.streaming_heads[:1]], problem.sparsity.block_size, self.q.device)

        def run() -> Any:
            out = torch.empty_like(self.q)
            for heads, keys, attend in (
                (full_queries, full_keys, functools.partial(self._sdpa, backend)),
                (streaming_queries, streaming, functools.partial(self._flex, mask=window)),
            ):
                if len(heads):
                    q, k, v = self.q.index_select(1, heads), self.k.index_select(1, keys), self.v.index_select(1, keys)
                    out.index_copy_(1, heads, attend(q, k, v))
            return out

        return run, expand


def block_mask(visible: np.ndarray, block_size: int, device: Any) -> Any:
    """FlexAttention's BlockMask of bool[N, Q, J], from block lists: a mask by element would be evaluated T x T times.

    Blocks below the diagonal are whole, so the kernel applies the causal mask in the diagonal block only, as ours does.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    seen = torch.from_numpy(np.ascontiguousarray(visible)).to(device)
    diagonal = torch.eye(seen.shape[-1], dtype=torch.bool, device=device)

    def lists(blocks: Any) -> tuple[Any, Any]:
        """Counts i32[1, N, Q] and indices i32[1, N, Q, J], those that are set first and in ascending order."""
        order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
        return blocks.sum(-1).to(torch.int32)[None].contiguous(), order.to(torch.int32)[None].contiguous()

    def by_element(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen[head % seen.shape[0], query // block_size, key // block_size] & (query >= key)

    # Uncompiled, FlexAttention ignores the lists and computes every score, so there the function has to hold the whole mask.
    mask_mod = _causal if seen.is_cuda else by_element
    return BlockMask.from_kv_blocks(*lists(seen & diagonal), *lists(seen & ~diagonal), BLOCK_SIZE=block_size, mask_mod=mask_mod)


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    del batch, head
    return query >= key


# What is tried at the tuning size: FlexAttention's defaults, then tiles that suit Hopper, and 64 x 64 for block masks of 64. Every row
# sees its diagonal, so no row needs the check for an empty one.
_SAFE = {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True}
FLEX_FORWARD: tuple[dict[str, Any], ...] = (
    {},
    _SAFE,
    _SAFE | {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 2},
    _SAFE | {"USE_TMA": True},
    _SAFE | {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
)
FLEX_BACKWARD: tuple[dict[str, Any], ...] = (
    {},
    _SAFE,
    _SAFE | {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64, "bwd_num_warps": 8, "bwd_num_stages": 2},
    _SAFE
    | {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
    | {"bwd_num_warps": 4, "bwd_num_stages": 3},
)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths, head counts and options are a program each; beyond the default of 8 the rest would fail.
    torch._dynamo.config.recompile_limit = 256
    # Timing the backward pass alone keeps the graph, which buffers handed over for reuse would forbid.
    torch._functorch.config.donated_buffer = False
    # Static shapes: with dynamic ones the kernel cannot know that the length is whole blocks and checks every load.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.cache
def _eager_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _to_torch(x: jax.Array) -> Any:
    """[1, T, N, H] to a tensor of its own, [1, N, T, H]."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(x)).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _to_jax(x: Any) -> jax.Array:
    import torch

    x = x.detach().transpose(1, 2).contiguous()
    if x.is_cuda:
        torch.cuda.synchronize()
    return jnp.from_dlpack(x)
