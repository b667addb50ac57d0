"""Prefill: what the whole model computes at each prompt's end, whatever stands beside it; memory; a pool that is too small."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax import prefill as prefill_module
from elastic_jax.cache import PagedCache, PagePool, keeps_ring
from elastic_jax.data.batch import PackedBatch
from elastic_jax.elastic import split_layers
from elastic_jax.prefill import prefill
from tests.tiny import BLOCK, SPARSITY, lively_model

SETTINGS = ["fa_ssa", "fa_xa", "xa_ssa"]


def prompts(*lengths, seed=0):
    """A prompt is a function of its length."""
    return [np.random.default_rng([seed, n]).integers(0, 97, n).astype(np.int32) for n in lengths]


TEXTS = prompts(1, 15, 16, 47, 96, 128)


def turns(texts):
    return [(min(2, len(text) - 1), max(1, len(text) - 3)) for text in texts]


def open_cache(model, texts, room=64, pages=600):
    """Rows of 12 slots in a pool of one size, where the longest prompt has 113 to 128 tokens: every shape is compiled."""
    pool = PagePool(pages, BLOCK, model.config.head_dim, jnp.float32)
    return PagedCache(pool, model.config, model.sparsity, [len(text) + room for text in texts])


def run(model, backbone, router, texts, **options):
    return prefill(model, split_layers(backbone), router, texts, turns(texts), open_cache(model, texts), **options)


def pack(text, turn, tokens=128):
    """The prompt as a pack of one document; nothing but padding comes after it."""
    row = np.pad(text, (0, tokens - len(text)))[None].astype(np.int32)
    zeros, block = np.zeros_like(row), np.arange(tokens // BLOCK, dtype=np.int32)[None]
    inside = block * BLOCK < len(text)
    return PackedBatch(
        tokens=row,
        targets=zeros,
        loss_weights=zeros.astype(np.float32),
        positions=np.arange(tokens, dtype=np.int32)[None],
        document=np.where(inside, 0, -1).astype(np.int32),
        first_block=np.where(inside, 0, block),
        task=np.zeros((1, 1), np.int32),
        span=np.array([[[0, len(text)]]], np.int32),
        user_turn=np.array([[turn]], np.int32),
        index=np.zeros(1, np.int32),
    )


def whole_logits(model, backbone, hidden):
    return jnp.einsum("...D,VD->...V", hidden, model.output_embedding(backbone), precision="highest")


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_prompt_ends_as_in_the_whole_model(setting):
    model, backbone, router = lively_model(sparsity=dataclasses.replace(SPARSITY, setting=setting))
    texts = TEXTS
    programs = prefill_module._project, prefill_module._attend
    before = [program._cache_size() for program in programs]
    result = run(model, backbone, router, texts)
    assert all(program._cache_size() <= size + 1 for program, size in zip(programs, before))  # compiled once for all layers
    assert 0.1 < result.is_full.mean() < 0.9
    forward = jax.jit(model.routed_forward)
    for row, (text, turn) in enumerate(zip(texts, turns(texts))):
        whole = forward(router, backbone, pack(text, turn))
        np.testing.assert_array_equal(result.is_full[:, row], np.asarray(whole.is_full[:, 0, 0]) > 0.5)
        np.testing.assert_allclose(result.logit[:, row], whole.logit[:, 0, 0], rtol=1e-3, atol=1e-4)
        expected = whole_logits(model, backbone, whole.hidden[0, len(text) - 1])
        np.testing.assert_allclose(result.logits[row], expected, atol=1e-4 * float(jnp.abs(expected).max()))
        if len(text) % BLOCK == 0:
            assert result.effective_sparsity[row] == pytest.approx(float(whole.effective_sparsity[0, 0]), abs=1e-6)


def test_given_heads_and_bias_replace_the_router():
    model, backbone, router = lively_model()
    texts = TEXTS
    routed = run(model, backbone, router, texts)
    given = run(model, backbone, None, texts, heads=routed.is_full)
    np.testing.assert_array_equal(given.logits, routed.logits)
    assert not given.logit.any()
    dense, sparse = (run(model, backbone, router, texts, logit_bias=bias) for bias in (np.inf, -np.inf))
    assert dense.is_full.all()
    assert not sparse.is_full.any()
    assert not dense.effective_sparsity.any()
    chosen = np.arange(6) % 2 == 0
    mixed = run(model, backbone, None, texts, heads=np.where(chosen[:, None], dense.is_full, sparse.is_full))
    np.testing.assert_array_equal(mixed.logits, np.where(chosen[:, None], dense.logits, sparse.logits))


@pytest.mark.parametrize(
    ("setting", "implementation", "others"),
    [("fa_ssa", "xla", [128, 5, 700]), ("xa_ssa", "xla", [128, 5, 200]), ("fa_ssa", "reference", [128, 5])],
)
def test_neighbours_and_padding_change_no_bit(setting, implementation, others):
    """The reference's dense softmax sums over all of T, so there T must be the same."""
    model, backbone, router = lively_model(implementation=implementation, sparsity=dataclasses.replace(SPARSITY, setting=setting))
    text, short = prompts(90, 20)
    beside = run(model, backbone, router, [short, text])
    for length in others:
        for row, one in enumerate((short, text)):
            other = prompts(length)
            again = run(model, backbone, router, [one, *other] if row == 0 else [*other, one])
            np.testing.assert_array_equal(again.logits[row], beside.logits[row], err_msg=str(length))
            np.testing.assert_array_equal(again.is_full[:, row], beside.is_full[:, row])
            np.testing.assert_array_equal(again.effective_sparsity[row], beside.effective_sparsity[row])
    if implementation == "xla" and setting == "fa_ssa":
        # A batch of another size. Only the head's product, which is one row for one sequence, has bits of its own then.
        six, alone = run(model, backbone, router, [*TEXTS[:4], short, text]), run(model, backbone, router, [text])
        np.testing.assert_array_equal(six.logits[4:], beside.logits)
        np.testing.assert_array_equal(alone.logit[:, 0], beside.logit[:, 1])
        np.testing.assert_allclose(alone.logits[0], beside.logits[1], rtol=1e-5, atol=1e-5)


def test_the_mlp_never_holds_all_tokens():
    wide = 4096
    model, backbone, _ = lively_model(changes={"mlp_size": wide})
    tokens, shape = 4096, jax.ShapeDtypeStruct
    x, q, k = (shape((1, tokens, *heads), jnp.float32) for heads in ((32,), (4, 16), (2, 16)))
    arguments = (x, q, k, k, shape((1, 1, 2), jnp.float32), shape((1,), jnp.int32))
    memory = prefill_module._attend.lower(model, split_layers(backbone)[0], *arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * wide * 4 / 4


def test_too_small_a_pool_is_refused_and_others_keep_their_keys():
    model, backbone, router = lively_model()
    texts = prompts(100)
    cache = open_cache(model, texts, room=0, pages=20)
    other = PagedCache(cache.pool, model.config, model.sparsity, [10])
    other.allocate(0, np.zeros((1, 2), bool))
    pages = cache.pool.pages
    full = np.ones((3, 1, 2))
    with pytest.raises(ValueError, match="20 pages of 16 tokens .* would do"):
        prefill(model, split_layers(backbone), None, texts, turns(texts), cache, heads=full)
    assert cache.pool.pages is pages  # nothing ran
    cache.free()
    cache = PagedCache(cache.pool, model.config, model.sparsity, [100])
    with pytest.raises(ValueError, match="20 pages of 16 tokens .* would do"):
        prefill(model, split_layers(backbone), router, texts, turns(texts), cache, logit_bias=np.inf)
    cache.free()
    assert cache.pool.num_free == 18
    assert not keeps_ring(full, model.sparsity).any()
