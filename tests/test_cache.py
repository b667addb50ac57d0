"""The paged cache: what each head still holds at every step, pages handed out and taken back, refusals that change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.cache import HeadTables, PagedCache, PagePool, bucket, keeps_ring, pages_needed, write_prompt, write_token
from elastic_jax.config import SparsityConfig
from elastic_jax.plan import routed_plan, visible_blocks
from tests.tiny import BLOCK, SPARSITY, tiny_config

CONFIG = tiny_config(num_layers=2)
DIM = CONFIG.head_dim
WRITE, STEP, SLOTS = jax.jit(write_prompt, donate_argnums=0), jax.jit(write_token, donate_argnums=0), jax.jit(HeadTables.slots)


def sparsity(sink=1, local=2, setting="fa_ssa"):
    return SparsityConfig(setting=setting, block_size=BLOCK, sink_tokens=sink * BLOCK, local_tokens=local * BLOCK, xattn_stride=4)


def make(capacity, pages=200, config=SPARSITY):
    pool = PagePool(pages, BLOCK, DIM, jnp.float32)
    return pool, PagedCache(pool, CONFIG, config, capacity)


def marked(batch, start, count):
    """k, v [B, count, K, H]: each token says who it is, as sequence, position and head."""
    grid = np.meshgrid(np.arange(batch), np.arange(start, start + count), np.arange(2), indexing="ij")
    k = np.zeros((batch, count, 2, DIM), np.float32)
    k[..., 0], k[..., 1], k[..., 2] = grid
    return k, -k


def seen(pool, tables, position):
    """What a kernel reads for tokens at `position`: for each sequence and head the positions, after a check of who they belong to."""
    slots = jax.device_get(SLOTS(tables, np.asarray(position, np.int32), np.ones(len(position), bool)))
    result, table, pool_keys, pool_values = [], np.asarray(tables.table), *jax.device_get(pool.pages)
    for b, k in np.ndindex(*slots.used.shape):
        found = []
        for slot in range(slots.used[b, k]):
            valid = slots.newest_tokens[b] if slot == slots.newest[b, k] else BLOCK
            keys, values = (x[table[b, k, slot], :valid] for x in (pool_keys, pool_values))
            np.testing.assert_array_equal(keys, -values)
            assert (keys[:, 0] == b).all()
            assert (keys[:, 2] == k).all()
            found += keys[:, 1].astype(int).tolist()
        result.append(found)
    return result


@functools.cache
def dense_mask(is_full, config):
    return np.asarray(visible_blocks(routed_plan(jnp.asarray(is_full, jnp.float32)[None, None], config), 16, 16))[0]


def expected(is_full, position, config):
    """The positions that the plan's dense mask shows a query at each sequence's position."""
    result = []
    for b, p in enumerate(position):
        row = p // BLOCK
        blocks = dense_mask(tuple(is_full[b].tolist()), config)[:, row]
        result += [[t for t in range(p + 1) if blocks[k, t // BLOCK]] for k in range(2)]
    return result


@pytest.mark.parametrize(("sink", "local"), [(1, 1), (1, 2), (2, 3)])
def test_every_head_holds_what_the_plan_shows_at_every_step(sink, local):
    """From prompts of 1 token to several windows, through page borders and the ring's wrap-around."""
    config, steps = sparsity(sink, local), 3 * BLOCK + 2
    is_full = np.array([[0, 1], [0, 0], [1, 0]])
    for lengths in ([1, 16, 17], [31, 32, 33], [47, 64, 80], [95, 96, 97]):
        pool, cache = make([n + steps for n in lengths], config=config)
        cache.allocate(0, keeps_ring(is_full, config))
        tables, lengths = cache.layer(0), np.array(lengths, np.int32)
        k, v = marked(3, 0, 112)
        k[np.arange(112) >= lengths[:, None]] = np.nan  # padding
        pool.pages = WRITE(pool.pages, tables, k, np.where(np.isnan(k), np.nan, v), lengths)
        for i in range(steps):
            position = lengths + i
            tokens = [marked(3, p, 1) for p in position]
            k, v = (np.stack([tokens[b][part][b, 0] for b in range(3)]) for part in range(2))
            pool.pages = STEP(pool.pages, tables, k, v, position, np.ones(3, bool))
            if i < 2 or (position % BLOCK < 2).any():
                assert list(map(sorted, seen(pool, tables, position))) == expected(is_full, position, config)


def test_sequences_that_are_not_active_write_and_use_nothing():
    pool, cache = make([40, 40])
    cache.allocate(0, np.zeros((2, 2), bool))
    position, active = np.array([3, 5], np.int32), np.array([True, False])
    k = np.ones((2, 2, DIM), np.float32)
    pool.pages = STEP(pool.pages, cache.layer(0), k, k, position, active)
    assert pool.pages.keys.sum() == 2 * DIM
    np.testing.assert_array_equal(cache.layer(0).slots(position, active).used, [[1, 1], [0, 0]])


@pytest.mark.parametrize("setting", ["fa_ssa", "fa_xa", "xa_ssa"])
def test_only_streaming_heads_get_a_ring(setting):
    ring = keeps_ring(np.array([1, 0]), sparsity(setting=setting))
    np.testing.assert_array_equal(ring, {"fa_ssa": [False, True], "fa_xa": [False, False], "xa_ssa": [False, True]}[setting])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pages_are_never_shared_and_never_lost(data):
    """Any order of opening, changing and freeing."""
    pool = PagePool(data.draw(st.integers(1, 120)), BLOCK, DIM, jnp.float32)
    caches = []
    for _ in range(data.draw(st.integers(1, 6))):
        action = data.draw(st.sampled_from(["open", "change", "free one", "free"])) if caches else "open"
        ring = np.array(data.draw(st.lists(st.booleans(), min_size=8, max_size=8))).reshape(2, 2, 2)
        cache = data.draw(st.sampled_from(caches)) if caches else None
        before = pool.num_free
        try:
            if action == "open":
                cache = PagedCache(pool, CONFIG, SPARSITY, data.draw(st.lists(st.integers(1, 150), min_size=2, max_size=2)))
                cache.lengths = cache.capacity - data.draw(st.integers(0, 20)) % cache.capacity
                caches.append(cache)
                for layer in range(2):
                    before = pool.num_free
                    cache.allocate(layer, ring[layer])
            elif action == "change":
                cache.change(cache.capacity + data.draw(st.integers(0, 60)), ring)
            else:
                cache.free(0 if action == "free one" else None)
        except ValueError:
            assert pool.num_free == before
        used = np.concatenate([c._table[c._table < pool.num_pages] for c in caches])
        both = np.concatenate([used, pool.free_pages])
        np.testing.assert_array_equal(np.sort(both), np.arange(pool.num_pages))
        for c in caches:
            filled = c._table < pool.num_pages
            np.testing.assert_array_equal(filled.sum(-1), c._count)
            np.testing.assert_array_equal(filled, np.arange(filled.shape[-1]) < c._count[..., None])  # leading slots


def test_memory_follows_the_decisions():
    pool, cache = make([40 * BLOCK, 3 * BLOCK], pages=1000)
    cache.allocate(0, np.array([[False, True], [True, True]]))
    assert cache.num_pages == 40 + 3 + 3 + 3 == 1000 - pool.num_free
    assert pool.page_bytes == 2 * BLOCK * DIM * 4


def test_too_small_a_pool_says_what_would_do_and_touches_nothing():
    pool, other = make([5 * BLOCK], pages=40)
    for layer in range(2):
        other.allocate(layer, np.zeros((1, 2), bool))
    table, free = other.layer(1).table.copy(), pool.num_free
    cache = PagedCache(pool, CONFIG, SPARSITY, [20 * BLOCK])
    with pytest.raises(
        ValueError, match=r"40 pages of 16 tokens .*, 20 of them free, and 40 are needed now: .* GiB \(cache_gib\)"
    ) as error:
        cache.allocate(0, np.zeros((1, 2), bool))
    assert pool.num_free == free
    np.testing.assert_array_equal(other.layer(1).table, table)
    # The size named has room for the second layer too, whatever is decided there.
    enough = float(str(error.value).split("needed now: ")[1].split(" GiB")[0]) * 2**30 / pool.page_bytes
    assert 100 <= enough < 101
    other.free()
    pool.grow(60)
    for layer in range(2):
        cache.allocate(layer, np.zeros((1, 2), bool))
    assert cache.num_pages == 80


def test_released_pages_count_as_free_and_a_refused_change_changes_nothing():
    pool, cache = make([20 * BLOCK], pages=40)
    cache.allocate(0, np.zeros((1, 2), bool))
    cache.lengths[:] = 20 * BLOCK
    table, free = cache.layer(0).table.copy(), pool.num_free
    with pytest.raises(ValueError, match="0 of them free|would do"):
        cache.change([400 * BLOCK], np.array([[[True, False]], [[True, True]]]))
    np.testing.assert_array_equal(cache.layer(0).table, table)
    assert (pool.num_free, cache.capacity[0], cache.num_pages) == (free, 20 * BLOCK, 40)
    assert pool.num_free == 0
    cache.change([22 * BLOCK], np.array([[[True, False]], [[True, True]]]))  # 17 pages go, 2 and 2 * 3 come
    assert cache.num_pages == 22 + 3 * 3
    assert pool.num_free == 40 - cache.num_pages


def test_a_grown_pool_keeps_what_it_holds():
    pool, cache = make([2 * BLOCK], pages=8)
    cache.allocate(0, np.zeros((1, 2), bool))
    k, v = marked(1, 0, 2 * BLOCK)
    pool.pages = WRITE(pool.pages, cache.layer(0), k, v, np.array([2 * BLOCK]))
    cache.lengths[:] = 2 * BLOCK
    ring = np.zeros((2, 1, 2), bool)
    pool.grow(cache.missing([9 * BLOCK], ring) - pool.num_free)
    cache.change([9 * BLOCK], ring)
    assert pool.num_free == 0
    assert cache.layer(0).table.shape[-1] == 12
    assert sorted(seen(pool, cache.layer(0), np.array([2 * BLOCK - 1]))[1]) == list(range(2 * BLOCK))


def test_a_freed_sequence_cannot_be_used_again():
    pool, cache = make([40, 40])
    cache.allocate(0, np.zeros((2, 2), bool))
    cache.free(1)
    free = pool.num_free
    cache.check(np.array([True, False]))
    for use in (
        cache.tables,
        lambda: cache.layer(0),
        lambda: cache.allocate(1, np.zeros((2, 2), bool)),
        lambda: cache.change([50, 50], np.zeros((2, 2, 2), bool)),
    ):
        with pytest.raises(ValueError, match=r"sequences \[1\] of this cache were freed"):
            use()
    cache.free(1)
    assert pool.num_free == free
    cache.free()
    assert pool.num_free == pool.num_pages


def test_heads_change_where_nothing_is_lost():
    config = sparsity(1, 2)
    is_full = np.array([[[1, 0]], [[1, 1]]])
    for length in (1, 40, 48, 80, 90):
        pool, cache = make([length + 40], config=config)
        for layer in range(2):
            cache.allocate(layer, keeps_ring(is_full[layer], config))
        k, v = marked(1, 0, 96)
        pool.pages = WRITE(pool.pages, cache.layer(0), k, v, np.array([length]))
        cache.lengths[:] = length
        other = np.array([[[0, 0]], [[1, 0]]])
        used = cache.num_pages
        cache.change([length + 40], keeps_ring(other, config))
        assert cache.num_pages <= used
        for position in range(length, length + 40):
            token = marked(1, position, 1)
            pool.pages = STEP(pool.pages, cache.layer(0), *(x[:, 0] for x in token), np.array([position]), np.ones(1, bool))
            assert list(map(sorted, seen(pool, cache.layer(0), np.array([position])))) == expected(other[0], [position], config)
        again = keeps_ring(np.ones((2, 1, 2)), config)
        cache.lengths[:] = length
        if length > 3 * BLOCK:
            table = cache.layer(0).table.copy()
            with pytest.raises(
                ValueError, match=rf"KV head 0 of layer 0 would keep every key again.*keeps 3 of {-(-length // BLOCK)} blocks"
            ):
                cache.change([length + 40], again)
            np.testing.assert_array_equal(cache.layer(0).table, table)
        else:
            cache.change([length + 40], again)
            assert cache.num_pages == 4 * pages_needed(length + 40, False, config)


@given(count=st.integers(1, 10**6), unit=st.sampled_from([1, 16, 128]), per_octave=st.sampled_from([2, 8]))
def test_buckets_waste_little(count, unit, per_octave):
    size = bucket(count, unit, per_octave)
    assert size >= count
    assert size % unit == 0
    units = -(-count // unit)
    assert size // unit - units <= units / per_octave
    assert bucket(size, unit, per_octave) == size


def test_buckets_are_few():
    assert sorted({bucket(n, 16) for n in range(1, 400)}) == [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert len({bucket(n, 1, 8) for n in range(1000, 64_000)}) == 49
