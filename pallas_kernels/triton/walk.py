"""Walking one row of `pallas_kernels.visits.Visits` inside a kernel, a tile at a time.

A visited block is walked as `parts` tiles. Loops come in a form that Triton pipelines: a counted loop whose loads depend on the counter
and on scalars.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# The place in a row's bits: () where the plan has none, else (slot, word): the index of the current word and what is left of it.
Cursor = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row, its tables read. start, length, second, count: i32[] as in `Visits`; word(slot) -> i32[], None without bitmaps."""

    start: Any
    length: Any
    second: Any
    count: Any
    word: Callable[[Any], Any] | None
    parts: int

    @classmethod
    def of(cls, runs: Any, words: Any, index: tuple[Any, Any, Any], parts: int) -> Row:
        """runs: a ref of the i32 table of `Visits`. words: of i32[B, h, R, W], or None. index: batch entry, head of the tables, row."""
        word = None
        if words is not None:
            last = words.shape[-1] - 1
            # The cursor is moved past the last set bit as well, where no word may follow.
            word = lambda slot: words[(*index, jnp.minimum(slot, last))]
        return cls(*(runs[(*index, field)] for field in range(4)), word=word, parts=parts)

    def begin(self) -> Cursor:
        return () if self.word is None else (jnp.int32(0), self.word(jnp.int32(0)))

    def block(self, step: Any, cursor: Cursor) -> Any:
        """The block of step number `step`, which a row of bits does not use: there `cursor` stands on it."""
        run = jnp.where(step < self.length, self.start + step, self.second + step - self.length)
        if self.word is None:
            return run
        _, word = cursor
        lowest = jax.lax.population_count((word & -word) - 1)
        return jnp.where(self.length < 0, 16 * jax.lax.shift_right_logical(word, jnp.int32(16)) + lowest, run)

    def advance(self, cursor: Cursor, leaves_block: Any = True) -> Cursor:
        """The cursor on the next set bit if `leaves_block`, otherwise the same."""
        if self.word is None:
            return ()
        slot, word = cursor
        rest = word & (word - 1)
        used_up = (rest & 0xFFFF) == 0
        # The next word is read always and used where this one is used up: a branch would keep the loop from being pipelined.
        moved = jnp.where(used_up, slot + 1, slot), jnp.where(used_up, self.word(slot + 1), rest)
        if leaves_block is True:
            return moved
        return tuple(jnp.where(leaves_block, new, old) for new, old in zip(moved, cursor))

    def loop(self, first: Any, last: Any, body: Callable[[Any, Any, Any], Any], carry: Any, cursor: Cursor) -> tuple[Any, Cursor]:
        """`carry = body(block, part, carry)` for every tile of the steps first .. last - 1; `cursor` stands on step `first`."""
        shift = self.parts.bit_length() - 1

        def tile(t: Any, state: Any) -> Any:
            carry, cursor = state
            part = t & (self.parts - 1)
            carry = body(self.block(t >> shift, cursor), part, carry)
            return carry, self.advance(cursor, True if self.parts == 1 else part == self.parts - 1)

        return jax.lax.fori_loop(first * self.parts, last * self.parts, tile, (carry, cursor))
