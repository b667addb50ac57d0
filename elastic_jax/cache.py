"""Per-head paged KV cache: one pool of pages for all layers, sequences and KV heads; each head keeps the pages that its mode reads.

Axis letters: L layers, B sequences, K KV heads, H head dim, T tokens, J blocks of T, P pages of the pool, M slots of a row of the table.

A page holds one block of one KV head's keys and values; keys are stored after RoPE, so a row's pages may be in any order.

| head                         | slot of block b                                     | slots in use at block r |
|------------------------------|-----------------------------------------------------|-------------------------|
| full, and XAttention's heads | b                                                   | r + 1                   |
| streaming                    | b below `sink`, then a ring: sink + (b - sink) % local | min(r + 1, sink + local) |

The ring is the window of `elastic_jax.plan` to the block: a query in block r sees blocks below sink and above r - local, and the slot
that block r takes over held block r - local, which has just left.

Two halves: `Pages` and `HeadTables` are device arrays, arguments of jitted functions; `PagePool` and `PagedCache` are their bookkeeping
on the host, where pages are handed out before a program runs, never inside one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elastic_jax.config import HeadMode, SparsityConfig
from elastic_jax.models.config import ModelConfig

# In slots without a page. A scatter drops it, whatever the pool's size.
_UNUSED = np.iinfo(np.int32).max


class Pages(NamedTuple):
    """The pool: keys after RoPE and values, [P, page, H] each."""

    keys: jax.Array
    values: jax.Array


class Slots(NamedTuple):
    """What a decode step reads of one layer's rows: see `pallas_kernels.decode.paged_decode_attention`."""

    used: jax.Array  # i32[B, K]
    newest: jax.Array  # i32[B, K]
    newest_tokens: jax.Array  # i32[B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTables:
    """Where the pages of every head are.

    Attributes:
      table: i32[L, B, K, M], the page of each slot; without L for one layer.
      ring: bool[L, B, K], streaming heads.
    """

    table: Any
    ring: Any
    page: int = dataclasses.field(metadata={"static": True})
    sink_blocks: int = dataclasses.field(metadata={"static": True})
    local_blocks: int = dataclasses.field(metadata={"static": True})

    def slot_of(self, block: jax.Array) -> jax.Array:
        """Of one layer: i32[B or 1, 1, n] block numbers to slots i32[B, K, n]."""
        ring = self.ring[..., None] & (block >= self.sink_blocks)
        return jnp.where(ring, self.sink_blocks + (block - self.sink_blocks) % self.local_blocks, block)

    def slots(self, position: jax.Array, active: jax.Array) -> Slots:
        """Of one layer, for tokens at `position` i32[B]; sequences that are not `active` bool[B] use nothing."""
        row = (position // self.page)[:, None]
        used = jnp.where(self.ring, jnp.minimum(row + 1, self.sink_blocks + self.local_blocks), row + 1)
        newest = self.slot_of(row[..., None])[..., 0]
        return Slots(jnp.where(active[:, None], used, 0), newest, position % self.page + 1)


def write_prompt(pages: Pages, tables: HeadTables, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Pages:
    """Puts one layer's prompt into its pages; blocks that no later token sees are left out.

    Args:
      tables: of this layer, table i32[B, K, M].
      k, v: [B, T, K, H], T in whole pages. lengths: i32[B], tokens of each prompt; what lies beyond is not stored, except in the last
        page, where it is overwritten before it is seen.
    """
    batch, tokens, kv_heads, dim = k.shape
    block = jnp.arange(tokens // tables.page, dtype=jnp.int32)
    last = ((lengths - 1) // tables.page)[:, None, None]
    in_window = (block < tables.sink_blocks) | (block > last - tables.local_blocks)
    kept = (block <= last) & (in_window | ~tables.ring[..., None])  # [B, K, J]
    slot = jnp.minimum(tables.slot_of(block[None, None]), tables.table.shape[-1] - 1)
    target = jnp.where(kept, jnp.take_along_axis(tables.table, slot, axis=-1), _UNUSED)

    def write(pool: jax.Array, x: jax.Array) -> jax.Array:
        blocks = x.reshape(batch, -1, tables.page, kv_heads, dim).transpose(0, 3, 1, 2, 4)
        return pool.at[target].set(blocks, mode="drop")

    return Pages(write(pages.keys, k), write(pages.values, v))


def write_token(pages: Pages, tables: HeadTables, k: jax.Array, v: jax.Array, position: jax.Array, active: jax.Array) -> Pages:
    """Puts one layer's new keys and values [B, K, H] at `position` i32[B]; nothing of sequences that are not `active` bool[B]."""
    newest = tables.slots(position, active).newest
    target = jnp.take_along_axis(tables.table, newest[..., None], axis=-1)[..., 0]
    target = jnp.where(active[:, None], target, _UNUSED)
    offset = (position % tables.page)[:, None]
    return Pages(pages.keys.at[target, offset].set(k, mode="drop"), pages.values.at[target, offset].set(v, mode="drop"))


class PagePool:
    """Device memory for pages and the list of those that are free. Several caches may share it.

    Args:
      device: where it lies and its caches' tables do; None: where JAX puts arrays.

    Attributes:
      pages: the device arrays. A jitted function that takes them as donated gets them from `lend` and returns new ones, which belong here
        again; where it fails, they are gone for all caches of the pool.
      num_pages: P. free_pages: i32[n], the numbers of those that are free.
      losses: how often that has happened.
    """

    def __init__(self, num_pages: int, page: int, head_dim: int, dtype: jax.typing.DTypeLike, *, device: Any = None) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: at least 1 is needed")
        self.num_pages, self._page, self._dtype, self.device = num_pages, (page, head_dim), dtype, device
        self.page_bytes = page_bytes(page, head_dim, dtype)
        self.losses = 0
        self._renew()

    def _renew(self) -> None:
        shape = (self.num_pages, *self._page)
        # `jnp.zeros(device=)` makes them where JAX puts arrays and copies them.
        with contextlib.nullcontext() if self.device is None else jax.default_device(self.device):
            pages = Pages(jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype))
        self.pages: Pages | None = jax.device_put(pages, self.device)
        self.free_pages = np.arange(self.num_pages, dtype=np.int32)[::-1]

    def lend(self) -> Pages:
        """The arrays, which the pool does not have until `pages` is set again."""
        assert self.pages is not None
        pages, self.pages = self.pages, None
        return pages

    def recover(self) -> None:
        """After a call that failed while it had the arrays: new ones, all free; caches of before are refused."""
        if self.pages is None:
            self.losses += 1
            self._renew()

    @property
    def num_free(self) -> int:
        return self.free_pages.size

    def gib(self, pages: int) -> float:
        return pages * self.page_bytes / 2**30

    def take(self, count: int) -> np.ndarray:
        """i32[count]: pages that are free no longer; the caller has checked that there are as many."""
        assert count <= self.free_pages.size
        taken, self.free_pages = self.free_pages[self.free_pages.size - count :][::-1], self.free_pages[: self.free_pages.size - count]
        return taken

    def give_back(self, pages: np.ndarray) -> None:
        self.free_pages = np.concatenate([self.free_pages, pages[::-1].astype(np.int32)])

    def grow(self, count: int) -> None:
        """Adds `count` free pages; the pool is copied, so both sizes are in memory for a moment."""
        assert self.pages is not None
        self.pages = Pages(*(jnp.pad(x, ((0, count), (0, 0), (0, 0))) for x in self.pages))
        self.give_back(np.arange(self.num_pages, self.num_pages + count, dtype=np.int32)[::-1])
        self.num_pages += count


def page_bytes(page: int, head_dim: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of one page's keys and values."""
    return 2 * page * head_dim * jnp.dtype(dtype).itemsize


def _rounded_up(number: float) -> str:
    """To three digits, never less than the number."""
    step = 10.0 ** (math.floor(math.log10(number)) - 2)
    return f"{math.ceil(number / step * (1 - 1e-12)) * step:.3g}"


def keeps_ring(is_full: np.ndarray, sparsity: SparsityConfig) -> np.ndarray:
    """bool[...]: heads that attend in streaming mode under hard decisions of the same shape; all others keep every page."""
    retrieval, sparse = (mode == HeadMode.STREAMING for mode in (sparsity.retrieval_mode, sparsity.sparse_mode))
    return np.where(np.asarray(is_full) > 0.5, retrieval, sparse)


def pages_needed(capacity: np.ndarray | int, ring: np.ndarray | bool, sparsity: SparsityConfig) -> np.ndarray:
    """Pages of heads with room for `capacity` tokens; the two arguments broadcast."""
    blocks = -(-np.asarray(capacity) // sparsity.block_size)
    return np.where(ring, np.minimum(blocks, sparsity.sink_blocks + sparsity.local_blocks), blocks)


def bucket(count: int, unit: int, per_octave: int = 2) -> int:
    """`count` rounded up to a multiple of `unit` that few counts share, since each is a shape to compile: with 2 sizes per octave these
    are unit * (1, 2, 3, 4, 6, 8, 12, 16, ...), of which at most a third is wasted, with n sizes 1 / (n + 1)."""
    units = -(-count // unit)
    step = max(1, (1 << (units - 1).bit_length() >> 1) // per_octave)
    return -(-units // step) * step * unit


class PagedCache:
    """The cached keys and values of a batch of sequences, in pages of a pool.

    Args:
      pool: gives the pages.
      config, sparsity: of the model; a page is a block.
      capacity: tokens that each sequence has room for.

    Attributes:
      lengths: i64[B], tokens stored; who writes pages counts them here.
      capacity: i64[B].
    """

    def __init__(self, pool: PagePool, config: ModelConfig, sparsity: SparsityConfig, capacity: Sequence[int]) -> None:
        self.pool, self._sparsity = pool, sparsity
        self.capacity = np.asarray(capacity, np.int64)
        self.lengths = np.zeros_like(self.capacity)
        shape = (config.num_layers, len(self.capacity), config.num_kv_heads)
        self._table = np.full((*shape, self._width()), _UNUSED, np.int32)
        self._ring = np.zeros(shape, bool)
        self._count = np.zeros(shape, np.int64)  # pages of each head
        self._freed, self._losses = np.zeros(len(self.capacity), bool), pool.losses
        self._device: HeadTables | None = None

    def _width(self) -> int:
        return bucket(int(pages_needed(self.capacity, False, self._sparsity).max()), 1)

    @property
    def num_pages(self) -> int:
        """Pages in use."""
        return int(self._count.sum())

    def allocate(self, layer: int, ring: np.ndarray) -> None:
        """Gives every head of a layer its pages.

        Args:
          ring: bool[B, K], streaming heads.

        Raises:
          ValueError: the pool has too few free pages; nothing has changed then. A sequence was freed.
        """
        self.check()
        self._fill(slice(layer, layer + 1), ring[None], self._count.shape[0] - layer - 1)

    def missing(self, capacity: Sequence[int], ring: np.ndarray) -> int:
        """Pages that `change` would take, arguments as there."""
        return int(np.maximum(pages_needed(np.asarray(capacity)[:, None], ring, self._sparsity) - self._count, 0).sum())

    def change(self, capacity: Sequence[int], ring: np.ndarray) -> None:
        """Makes room for more tokens, and changes which heads are streaming; such a head gives back the pages outside its window.

        Args:
          capacity: B numbers, at least the present ones. ring: bool[L, B, K].

        Raises:
          ValueError: a streaming head would have to keep every page, and some of its keys are gone already; the pool has too few free
            pages; a sequence was freed. Nothing has changed then.
        """
        self.check()
        assert (np.asarray(capacity) >= self.capacity).all()
        size, sink, local = self._sparsity.block_size, self._sparsity.sink_blocks, self._sparsity.local_blocks
        blocks = -(-self.lengths // size)  # [B], that hold tokens
        if (gone := self._ring & ~ring & (blocks > sink + local)[:, None]).any():
            layer, sequence, head = (int(x[0]) for x in np.nonzero(gone))
            raise ValueError(
                f"KV head {head} of layer {layer} would keep every key again, but in sequence {sequence} it has been streaming and keeps "
                f"{sink + local} of {blocks[sequence]} blocks: run the whole conversation anew (reroute=True) to have them"
            )
        old, free = (self.capacity, self._table.copy(), self._count.copy()), self.pool.free_pages
        released = [np.zeros(0, np.int32)]
        for layer, sequence, head in zip(*np.nonzero(ring & ~self._ring)):
            row, count = self._table[layer, sequence, head], int(self._count[layer, sequence, head])
            pages, total = row[:count].copy(), int(blocks[sequence])
            window = [*range(min(sink, count)), *range(max(sink, total - local), count)][: sink + local]
            row[:] = _UNUSED
            for block in window:
                row[block if block < sink else sink + (block - sink) % local] = pages[block]
            self._count[layer, sequence, head] = len(window)
            released.append(np.delete(pages, window))
        self.capacity = np.asarray(capacity, np.int64)
        self.pool.give_back(np.concatenate(released))
        try:
            self._fill(slice(None), ring, 0)
        except ValueError:
            (self.capacity, self._table, self._count), self.pool.free_pages = old, free
            raise

    def _fill(self, layers: slice, ring: np.ndarray, layers_after: int) -> None:
        """Pages up to the capacity for the heads of `layers`; the error allows for full heads in as many `layers_after` them."""
        wanted = pages_needed(self.capacity[:, None], ring, self._sparsity)
        more = wanted - self._count[layers]
        total, pool = int(more.sum()), self.pool
        if total > pool.num_free:
            worst = layers_after * self._count.shape[2] * int(pages_needed(self.capacity, False, self._sparsity).sum())
            size = pool.num_pages - pool.num_free + total + worst
            raise ValueError(
                f"the cache's pool has {pool.num_pages} pages of {self._sparsity.block_size} tokens ({pool.gib(pool.num_pages):.3g} GiB), "
                f"{pool.num_free} of them free, and {total} are needed now: {_rounded_up(pool.gib(size))} GiB (cache_gib) would do"
            )
        if self._width() > self._table.shape[-1]:
            self._table = np.pad(self._table, [(0, 0)] * 3 + [(0, self._width() - self._table.shape[-1])], constant_values=_UNUSED)
        slot = np.arange(self._table.shape[-1])
        new = (slot >= self._count[layers][..., None]) & (slot < wanted[..., None])
        self._table[layers][new] = pool.take(total)
        self._ring[layers], self._count[layers] = ring, wanted
        self._device = None

    def layer(self, layer: int) -> HeadTables:
        """One layer's tables, as `write_prompt` wants them."""
        self.check()
        return self._tables(self._table[layer], self._ring[layer])

    def tables(self, sequences: np.ndarray | slice = slice(None)) -> HeadTables:
        """All layers' tables on the device, for these sequences; ValueError where one of them was freed."""
        self.check(sequences)
        if self._device is None:
            self._device = self._tables(*jax.device_put((self._table, self._ring), self.pool.device))
        return self._device

    def _tables(self, table: Any, ring: Any) -> HeadTables:
        s = self._sparsity
        return HeadTables(table=table, ring=ring, page=s.block_size, sink_blocks=s.sink_blocks, local_blocks=s.local_blocks)

    def check(self, sequences: np.ndarray | slice = slice(None)) -> None:
        """ValueError where one of these sequences was freed, or the pages were lost."""
        if self.pool.pages is None or self.pool.losses != self._losses:
            raise ValueError("the pages of this cache were lost when a call failed that was working on them: begin again with a new one")
        if self._freed[sequences].any():
            freed = np.flatnonzero(self._freed).tolist()
            raise ValueError(f"sequences {freed} of this cache were freed: their pages may hold keys of others")

    def free(self, sequence: int | None = None) -> None:
        """Gives back a sequence's pages, or all; what was freed before stays freed."""
        chosen = np.zeros(len(self.capacity), bool)
        chosen[slice(None) if sequence is None else sequence] = True
        rows = self._table[:, chosen]
        if self.pool.losses == self._losses:
            self.pool.give_back(rows[rows != _UNUSED])
        self._table[:, chosen], self._count[:, chosen] = _UNUSED, 0
        self._freed |= chosen
        self._device = None
