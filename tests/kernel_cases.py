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
    """One call.

    modes: of the KV heads in turn; every entry and every document of a pack begins one mode further on. documents: blocks of each document
    of a pack; () for one document. bitmap: heads that have a bitmap row. ragged: entries end somewhere in the later half of the queries.
    """

    name: str
    queries: int
    keys: int
    heads: int = 3
    kv_heads: int = 3
    batch: int = 1
    head_dim: int = 16
    block: int = 16
    documents: tuple[int, ...] = ()
    modes: tuple[HeadMode, ...] = (HeadMode.BLOCK_SPARSE, HeadMode.FULL, HeadMode.STREAMING)
    bitmap: str = "query"  # or "kv", or "none"
    ragged: bool = False
    dtype: Any = jnp.float32

    @property
    def num_blocks(self) -> int:
        return -(-self.keys // self.block)


WITHOUT_BITMAP = {"bitmap": "none", "modes": (HeadMode.FULL, HeadMode.STREAMING)}
# Modes stand where a listed row has something to walk: the words of a bitmap hold 32 blocks, those that kernels walk 16.
CASES = [
    Case(name="one_block", queries=16, keys=16, heads=6, modes=(HeadMode.BLOCK_SPARSE, HeadMode.BLOCK_SPARSE, HeadMode.FULL)),
    Case(name="two_tiles_grouped", queries=512, keys=512, heads=9, kv_heads=3, head_dim=64, block=64),
    Case(name="off_block_ragged", queries=333, keys=333, heads=4, kv_heads=1, batch=3, ragged=True),
    Case(name="suffix", queries=37, keys=601, heads=4, kv_heads=2, batch=2, bitmap="kv", ragged=True),
    Case(name="packed", queries=560, keys=560, heads=6, kv_heads=2, batch=2, documents=(3, 17, 1, 12), head_dim=24),
    Case(name="no_bitmap", queries=130, keys=130, heads=2, kv_heads=2, batch=2, **WITHOUT_BITMAP),
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
    """Random arrays. Padding blocks after the last document are a document of their own. Bitmaps have rows that are walked."""
    rng = np.random.default_rng(seed)
    q, d_out = (rng.standard_normal((case.batch, case.queries, case.heads, case.head_dim)) for _ in range(2))
    k, v = (rng.standard_normal((case.batch, case.keys, case.kv_heads, case.head_dim)) for _ in range(2))
    blocks, first_block = case.num_blocks, None
    turn = np.arange(case.kv_heads) + np.arange(case.batch)[:, None]
    if case.documents:
        begins = np.cumsum((0, *case.documents))
        document = np.searchsorted(begins, np.arange(blocks), side="right") - 1
        padding = np.arange(blocks) >= begins[-1]
        first_block = jnp.asarray(np.broadcast_to(np.where(padding, np.arange(blocks), begins[document]), (case.batch, blocks)), jnp.int32)
        turn = turn[:, None] + document[:, None]
    mode = np.asarray(case.modes)[turn % len(case.modes)]
    bitmap = None
    if case.bitmap != "none":
        heads = case.kv_heads if case.bitmap == "kv" else case.heads
        density = np.where(np.arange(blocks) % 2, 0.05, 0.6)[:, None]  # rows that skip words lie between rows that do not
        bitmap = BlockMask.from_dense(jnp.asarray(rng.random((case.batch, heads, blocks, blocks)) < density))
    lengths = jnp.asarray(rng.integers(case.keys - case.queries // 2, case.keys, case.batch), jnp.int32) if case.ragged else None
    plan = HeadPlan(mode=jnp.asarray(mode, jnp.int8), blocks=bitmap, sink_blocks=1, local_blocks=2, block_size=case.block)
    x = Inputs(*(jnp.asarray(x, case.dtype) for x in (q, k, v, d_out)), plan, lengths, first_block)
    assert_bitmaps_are_walked(case, x)
    return x


def listed_rows(case: Case, x: Inputs) -> list[np.ndarray]:
    """The visited blocks of each BLOCK_SPARSE row of blocks that holds a query, of all heads of the bitmap."""
    if x.plan.blocks is None:
        return []
    mode, lengths, first = tables(case, x)
    dense = np.asarray(x.plan.blocks.to_dense(case.num_blocks))
    per_mode = dense.shape[1] // case.kv_heads
    return [
        first[b, r] + np.flatnonzero(dense[b, h, r, first[b, r] : r + 1])
        for b, h, r in np.ndindex(dense.shape[:3])
        if mode[b, r, h // per_mode] == HeadMode.BLOCK_SPARSE
        and r >= (case.keys - case.queries) // case.block
        and r * case.block < lengths[b]
    ]


def assert_bitmaps_are_walked(case: Case, x: Inputs) -> None:
    """Some row has more than one block to visit, so that what a kernel reads from the words decides its results."""
    if x.plan.blocks is not None:
        longest = max((len(row) for row in listed_rows(case, x)), default=0)
        assert longest >= min(2, case.num_blocks), f"{case.name}: no BLOCK_SPARSE row of a query visits more than {longest} blocks"


@functools.partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, d_out, plan, lengths, first_block, *, implementation):
    """(out, lse, dq, dk, dv); the plan is traced, as it is where a router made it."""

    def f(q, k, v):
        return mixed_head_attention(q, k, v, plan, lengths=lengths, first_block=first_block, implementation=implementation)

    out, pullback, lse = jax.vjp(f, q, k, v, has_aux=True)
    return out, lse, *pullback(d_out)


def run(x: Inputs, implementation: str) -> tuple[jax.Array, ...]:
    return attend(x.q, x.k, x.v, x.d_out, x.plan, x.lengths, x.first_block, implementation=implementation)


def tables(case: Case, x: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mode [B, J, K], lengths [B], first_block [B, J]) of a call, where `inputs` may leave out axes and arrays."""
    mode = np.asarray(x.plan.mode)
    mode = np.broadcast_to(mode[:, None] if mode.ndim == 2 else mode, (case.batch, case.num_blocks, case.kv_heads))
    lengths = np.full(case.batch, case.keys) if x.lengths is None else np.asarray(x.lengths)
    return mode, lengths, np.zeros(mode.shape[:2], int) if x.first_block is None else np.asarray(x.first_block)


NAMES = ("out", "lse", "dq", "dk", "dv")  # what `attend` returns


def assert_agrees(actual: tuple[Any, ...], x: Inputs, case: Case) -> None:
    for name, a, e in zip(NAMES, actual, run(x, "reference")):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        assert_close(a, e, case.dtype, "gradient" if name[0] == "d" else "forward", name)


def assert_gpu_agrees_and_repeats(case: Case, implementation: str) -> None:
    x = inputs(case)
    actual = run_on_gpu(x, implementation)
    assert_agrees(actual, x, case)
    for again, first in zip(run_on_gpu(x, implementation), actual):
        assert_same_bits(again, first)


def assert_gpu_entries_are_independent(implementation: str, **changes: Any) -> None:
    case, x = four_plans(**changes)
    together = run_on_gpu(x, implementation)
    assert_agrees(together, x, case)
    for b in range(case.batch):
        for actual, expected in zip(run_on_gpu(take_entries(x, slice(b, b + 1)), implementation), together):
            assert_same_bits(actual, expected[b : b + 1])


def run_on_gpu(x: Inputs, implementation: str) -> tuple[jax.Array, ...]:
    # Freed memory full of NaN is what the outputs are then likely to be made of.
    jnp.full((256, 2**20), jnp.nan).block_until_ready().delete()
    return run(x, implementation)


def assert_same_bits(actual: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


def four_plans(**changes: Any) -> tuple[Case, Inputs]:
    """Four entries of 12 blocks whose documents, modes, lengths and bitmaps differ. changes: of the case's fields."""
    case = Case(**{"name": "entries", "queries": 160, "keys": 192, "heads": 4, "kv_heads": 2, "batch": 4, "ragged": True} | changes)
    x = inputs(case)
    rng = np.random.default_rng(1)
    begins = np.asarray([[0, 12], [0, 3], [0, 7], [0, 11]])
    document = (np.arange(12) >= begins[:, 1:]).astype(int)
    mode = np.stack([rng.integers(0, 3, (2, 2))[d] for d in document])
    first_block = jnp.asarray(np.take_along_axis(begins, document, axis=1), jnp.int32)
    x = dataclasses.replace(x, plan=dataclasses.replace(x.plan, mode=jnp.asarray(mode, jnp.int8)), first_block=first_block)
    assert_bitmaps_are_walked(case, x)
    return case, x


def take_entries(x: Inputs, index: Any) -> Inputs:
    return Inputs(*(jax.tree.map(lambda a: a[index], getattr(x, f.name)) for f in dataclasses.fields(x)))


def dense_mask(case: Case, x: Inputs) -> np.ndarray:
    """bool[B, N, T, S], element by element from the words of the house plan."""
    group = case.heads // case.kv_heads
    mode, lengths, first = tables(case, x)
    bitmap = None if x.plan.blocks is None else np.asarray(x.plan.blocks.bitmap)
    sink, local = x.plan.sink_blocks, x.plan.local_blocks
    mask = np.zeros((case.batch, case.heads, case.queries, case.keys), bool)
    for b, n, t in np.ndindex(mask.shape[:3]):
        p = case.keys - case.queries + t
        if p >= lengths[b]:
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


def random_qk(tokens, heads=4, kv_heads=2, batch=2, dim=16, seed=0, dtype=jnp.float32, sharpness=12):
    """Queries and keys of XAttention's tests. sharpness: of the scores, so that a threshold leaves something out."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, tokens, heads, dim)) * sharpness
    return jnp.asarray(q, dtype), jnp.asarray(rng.standard_normal((batch, tokens, kv_heads, dim)), dtype)
