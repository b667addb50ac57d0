"""PyTorch's attention on the same inputs and masks, in the same process: SDPA (cuDNN, flash), FlexAttention, and serial dispatch.

Serial dispatch is how a mixed layer runs without a mixed kernel, and the paper's baseline (Algorithm 1a, Fig. 4): gather the full heads
and attend, gather the streaming heads and attend within their window, scatter both into the output. Where no head streams, or every
one, there is nothing to gather: it is one call on the layer's own tensors, dense attention or the window kernel.

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

from experiments.bench import flex
from experiments.bench.implementations import Prepared
from experiments.bench.problem import Problem
from experiments.bench.timing import TorchCall


class TorchSide:
    """A problem's tensors and the rivals on them.

    Raises:
      ImportError: there is no PyTorch. RuntimeError: it does not see the GPU.
    """

    def __init__(self, problem: Problem):
        import torch

        self.cuda = jax.default_backend() == "gpu"
        if self.cuda and not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        self.problem = problem
        self.q, self.k, self.v = (_to_torch(x) for x in problem.arrays)
        self.group = problem.shape.heads // problem.shape.kv_heads

    def forward(self, name: str, options: dict[str, Any]) -> Prepared:
        """`cudnn_torch` and `flash_torch` (dense), `flex_torch` (the plan's mask), `serial_cudnn` and `serial_flash`.

        Args:
          options: `kernel_options` of FlexAttention where the implementation uses it.
        """
        import torch

        if name in ("cudnn_torch", "flash_torch"):
            run, notes = self._dense(name.removesuffix("_torch"))
        elif name == "flex_torch":
            mask, notes = self._mask(), {"kernel_options": options}
            run = lambda: flex.attend(self.q, self.k, self.v, mask, options)
        else:
            run, notes = self._serial(name.removeprefix("serial_"), options)

        def without_gradient() -> Any:
            with torch.no_grad():
                return run()

        return Prepared(TorchCall(without_gradient, self.cuda), lambda out: (_to_jax(out),), notes)

    def backward(self, name: str, options: dict[str, Any]) -> Prepared:
        """The gradients alone, of `cudnn_torch`, `flash_torch` (dense) and `flex_torch`, from a forward pass whose graph is kept."""
        import torch

        notes: dict[str, Any] = {}
        if name == "flex_torch":
            notes["kernel_options"] = options
            attend, (k, v) = functools.partial(flex.attend, mask=self._mask(), options=options), (self.k, self.v)
        else:
            backend = name.removesuffix("_torch")
            notes["heads_expanded"] = not self._takes_groups(backend, gradient=True)
            attend, (k, v) = functools.partial(self._sdpa, backend), self._keys(notes["heads_expanded"])
        d_out = _to_torch(self.problem.d_out)
        leaves = [x.detach().requires_grad_() for x in (self.q, k, v)]
        out = attend(*leaves)

        def to_jax(gradients: tuple[Any, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv = (_to_jax(x) for x in gradients)
            fold = lambda x: x.reshape(*x.shape[:2], self.problem.shape.kv_heads, -1, x.shape[-1]).astype(jnp.float32).sum(3)
            return dq, fold(dk), fold(dv)

        return Prepared(TorchCall(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True), self.cuda), to_jax, notes)

    def _mask(self) -> Any:
        visible = np.repeat(self.problem.visible, self.group, axis=0)
        return flex.block_mask(visible, self.problem.sparsity.block_size, self.q.device)

    def _dense(self, backend: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        expanded = not self._takes_groups(backend, gradient=False)
        k, v = self._keys(expanded)
        return lambda: self._sdpa(backend, self.q, k, v), {"heads_expanded": expanded}

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

    def _serial(self, backend: str, options: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
        """(one run over the layer's heads, notes)."""
        import torch

        problem, group = self.problem, self.group
        if not problem.streaming_heads:
            return self._dense(backend)
        # All streaming heads have the same window, so its lists have one head, whatever the number that reads them.
        window = flex.block_mask(problem.visible[problem.streaming_heads[:1]], problem.sparsity.block_size, self.q.device)
        if not problem.full_heads:
            return lambda: flex.attend(self.q, self.k, self.v, window, options), {"kernel_options": options}
        expand = not self._takes_groups(backend, gradient=False)
        index = lambda heads: torch.tensor(heads, device=self.q.device)
        queries = lambda heads: index([head * group + g for head in heads for g in range(group)])
        full, full_queries = index(problem.full_heads), queries(problem.full_heads)
        streaming, streaming_queries = index(problem.streaming_heads), queries(problem.streaming_heads)
        full_keys = full.repeat_interleave(group) if expand else full

        def run() -> Any:
            out = torch.empty_like(self.q)
            for heads, keys, attend in (
                (full_queries, full_keys, functools.partial(self._sdpa, backend)),
                (streaming_queries, streaming, functools.partial(flex.attend, mask=window, options=options)),
            ):
                q, k, v = self.q.index_select(1, heads), self.k.index_select(1, keys), self.v.index_select(1, keys)
                out.index_copy_(1, heads, attend(q, k, v))
            return out

        return run, {"kernel_options": options, "heads_expanded": expand}


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
