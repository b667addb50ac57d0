"""Inputs that every kernel implementation is tested with, and a numpy oracle that shares no code with the package."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elastic_jax.config import HeadMode
from elastic_jax.plan import BlockMask, HeadPlan
from pallas_kernels.api import mixed_head_attention
from tests.tolerances import assert_close


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one call. documents: blocks of each document of a pack; () for one document. bitmap: heads that have a bitmap row."""

    name: str
    queries: int
    keys: int
    heads: int = 3
    kv_heads: int = 3
    batch: int = 1
    head_dim: int = 16
    block: int = 16
    documents: tuple[int, ...] = ()
    bitmap: str = "query"  # or "kv", or "none"
    ragged: bool = False
    dtype: Any = jnp.float32

    @property
    def num_blocks(self) -> int:
        return -(-self.keys // self.block)


CASES = [
    Case(name="one_block", queries=16, keys=16),
    Case(name="two_tiles_grouped", queries=512, keys=512, heads=9, kv_heads=3, head_dim=64, block=64),
    Case(name="off_block_ragged", queries=333, keys=333, heads=4, kv_heads=1, batch=3, ragged=True),
    Case(name="suffix", queries=37, keys=601, heads=4, kv_heads=2, batch=2, bitmap="kv", ragged=True),
    Case(name="packed", queries=560, keys=560, heads=6, kv_heads=2, batch=2, documents=(3, 17, 1, 12), head_dim=24),
    Case(name="no_bitmap", queries=130, keys=130, heads=2, kv_heads=2, batch=2, bitmap="none"),
    Case(name="bfloat16", queries=320, keys=320, heads=8, kv_heads=2, head_dim=64, block=32, dtype=jnp.bfloat16),
    Case(name="float16", queries=192, keys=192, heads=4, kv_heads=2, dtype=jnp.float16),
]


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    plan: HeadPlan
    lengths: jax.Array | None
    first_block: jax.Array | None


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Random arrays; modes differ by entry and head, and by document where there are several (padding blocks follow the last)."""
    rng = np.random.default_rng(seed)
    q, d_out = (rng.standard_normal((case.batch, case.queries, case.heads, case.head_dim)) for _ in range(2))
    k, v = (rng.standard_normal((case.batch, case.keys, case.kv_heads, case.head_dim)) for _ in range(2))
    blocks, first_block = case.num_blocks, None
    modes = 2 if case.bitmap == "none" else 3
    mode = (np.arange(case.kv_heads) + np.arange(case.batch)[:, None]) % modes
    if case.documents:
        begins = np.cumsum((0, *case.documents))
        document = np.searchsorted(begins, np.arange(blocks), side="right") - 1
        padding = np.arange(blocks) >= begins[-1]
        first_block = jnp.asarray(np.broadcast_to(np.where(padding, np.arange(blocks), begins[document]), (case.batch, blocks)), jnp.int32)
        mode = (mode[:, None] + document[:, None]) % modes
    bitmap = None
    if case.bitmap != "none":
        heads = case.kv_heads if case.bitmap == "kv" else case.heads
        bitmap = BlockMask.from_dense(jnp.asarray(rng.random((case.batch, heads, blocks, blocks)) < 0.3))
    lengths = jnp.asarray(rng.integers(case.keys // 2, case.keys, case.batch), jnp.int32) if case.ragged else None
    plan = HeadPlan(mode=jnp.asarray(mode, jnp.int8), blocks=bitmap, sink_blocks=1, local_blocks=2, block_size=case.block)
    return Inputs(*(jnp.asarray(x, case.dtype) for x in (q, k, v, d_out)), plan, lengths, first_block)


@functools.partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, d_out, plan, lengths, first_block, *, implementation):
    """(out, lse, dq, dk, dv); the plan is traced, as it is where a router made it."""

    def f(q, k, v):
        return mixed_head_attention(q, k, v, plan, lengths=lengths, first_block=first_block, implementation=implementation)

    out, pullback, lse = jax.vjp(f, q, k, v, has_aux=True)
    return out, lse, *pullback(d_out)


def run(x: Inputs, implementation: str) -> tuple[jax.Array, ...]:
    return attend(x.q, x.k, x.v, x.d_out, x.plan, x.lengths, x.first_block, implementation=implementation)


NAMES = ("out", "lse", "dq", "dk", "dv")  # what `attend` returns


def assert_agrees(actual: tuple[Any, ...], x: Inputs, case: Case) -> None:
    for name, a, e in zip(NAMES, actual, run(x, "reference")):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        assert_close(a, e, case.dtype, "gradient" if name[0] == "d" else "forward", name)


def assert_same_bits(actual: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


def four_plans(**changes: Any) -> Inputs:
    """Four entries of 12 blocks whose documents, modes, lengths and bitmaps differ. changes: of the case's fields."""
    case = Case(**{"name": "entries", "queries": 160, "keys": 192, "heads": 4, "kv_heads": 2, "batch": 4, "ragged": True} | changes)
    x = inputs(case)
    rng = np.random.default_rng(1)
    begins = np.asarray([[0, 12], [0, 3], [0, 7], [0, 11]])
    document = (np.arange(12) >= begins[:, 1:]).astype(int)
    mode = np.stack([rng.integers(0, 3, (2, 2))[d] for d in document])
    first_block = jnp.asarray(np.take_along_axis(begins, document, axis=1), jnp.int32)
    return dataclasses.replace(x, plan=dataclasses.replace(x.plan, mode=jnp.asarray(mode, jnp.int8)), first_block=first_block)


def take_entries(x: Inputs, index: Any) -> Inputs:
    return Inputs(*(jax.tree.map(lambda a: a[index], getattr(x, f.name)) for f in dataclasses.fields(x)))


def dense_mask(case: Case, x: Inputs) -> np.ndarray:
    """bool[B, N, T, S], element by element from the words of the house plan."""
    group = case.heads // case.kv_heads
    mode = np.asarray(x.plan.mode)
    mode = np.broadcast_to(mode[:, None] if mode.ndim == 2 else mode, (case.batch, case.num_blocks, case.kv_heads))
    first = np.zeros((case.batch, case.num_blocks), int) if x.first_block is None else np.asarray(x.first_block)
    bitmap = None if x.plan.blocks is None else np.asarray(x.plan.blocks.bitmap)
    sink, local = x.plan.sink_blocks, x.plan.local_blocks
    mask = np.zeros((case.batch, case.heads, case.queries, case.keys), bool)
    for b, n, t in np.ndindex(mask.shape[:3]):
        p = case.keys - case.queries + t
        if x.lengths is not None and p >= int(x.lengths[b]):
            continue
        r, kv = p // case.block, n // group
        a = first[b, r]
        if mode[b, r, kv] == HeadMode.FULL:
            seen = list(range(a, r + 1))
        elif mode[b, r, kv] == HeadMode.STREAMING:
            seen = [j for j in (*range(a, a + sink), *range(max(a + sink, r - local + 1), r + 1)) if j <= r]
        else:
            row = bitmap[b, n if bitmap.shape[1] == case.heads else kv, r] if bitmap is not None else np.zeros(99, np.uint32)
            seen = [j for j in range(a, r + 1) if int(row[j // 32]) >> (j % 32) & 1]
        for j in seen:
            mask[b, n, t, j * case.block : min((j + 1) * case.block, p + 1)] = True
    return mask


def oracle(case: Case, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, T, N, H], lse [B, T, N]) in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v))
    k, v = (np.repeat(a, case.heads // case.kv_heads, axis=2) for a in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * case.head_dim**-0.5
    p = np.where(dense_mask(case, x), np.exp(scores), 0.0)
    total = p.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", p / np.maximum(total, 1e-300), v)
    with np.errstate(divide="ignore"):
        return out, np.log(total[..., 0]).swapaxes(1, 2)
