"""Decoding: every step is the whole model's next position, and nothing but a sequence itself changes its tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax import decoding
from elastic_jax.decoding import MAX_STEPS, feed_tokens, first_token, generate_tokens
from elastic_jax.elastic import split_layers
from elastic_jax.prefill import prefill
from elastic_jax.sampling import Sampling
from tests.test_prefill import TEXTS, open_cache, pack, prompts, turns, whole_logits
from tests.tiny import BLOCK, SPARSITY, lively_model

NEVER = -np.ones((1, 1), np.int32)


def decisions(batch, seed=0, layers=3):
    return np.random.default_rng(seed).integers(0, 2, (layers, batch, 2)).astype(np.float32)


def greedy(batch, seeds=None, temperature=0.0):
    seeds = np.asarray(seeds or range(batch), np.uint32)
    return Sampling(np.float32(temperature), np.int32(0), np.float32(1), seeds, first_stop=np.zeros(seeds.size, np.int32))


def start(model, backbone, texts, heads, sampling=None, stops=NEVER):
    cache = open_cache(model, texts)
    result = prefill(model, split_layers(backbone), None, texts, turns(texts), cache, heads=heads)
    stops = np.broadcast_to(stops, (len(texts), stops.shape[1]))
    return cache, first_token(result.logits, cache.lengths.astype(np.int32), sampling or greedy(len(texts)), stops)


def generate(model, backbone, texts, heads, steps=40, sampling=None, stops=NEVER, at_once=MAX_STEPS):
    """The tokens i32[B, 1 + n] and the cache."""
    sampling = sampling or greedy(len(texts))
    stops = np.broadcast_to(stops, (len(texts), stops.shape[1]))
    cache, state = start(model, backbone, texts, heads, sampling, stops)
    tokens = [np.asarray(state.token)[:, None]]
    while steps:
        state, new = generate_tokens(model, split_layers(backbone), cache, state, sampling, stops, min(steps, at_once))
        steps -= min(steps, at_once)
        tokens.append(new)
    return np.concatenate(tokens, axis=1), cache, state


FORWARD = jax.jit(
    lambda model, backbone, batch, is_full: whole_logits(model, backbone, model.forced_forward(backbone, batch, is_full).hidden[0]),
    static_argnums=0,
)


def whole(model, backbone, text, is_full, tokens=192):
    """f32[T, V]: logits at every position of a text, run as one document with given decisions [L, K]."""
    return np.asarray(FORWARD(model, backbone, pack(text, (0, 1), tokens), jnp.asarray(is_full)[:, None, None]))[: len(text)]


@pytest.mark.parametrize(("setting", "window"), [("fa_ssa", 2), ("fa_ssa", 1), ("xa_ssa", 2)])
def test_every_step_is_the_whole_models_next_position(setting, window):
    """The paged cache against attention over the whole text: full heads see all of it, streaming heads sink and window, from 1 token to
    several windows and past the ring's wrap-around; XAttention with every block, since decoding reads all pages of such a head."""
    threshold = 1.0 if setting == "xa_ssa" else SPARSITY.xattn_threshold
    sparsity = dataclasses.replace(SPARSITY, setting=setting, local_tokens=window * BLOCK, xattn_threshold=threshold)
    model, backbone, _ = lively_model(sparsity=sparsity)
    texts = TEXTS
    heads, steps = decisions(6), 60
    cache, _ = start(model, backbone, texts, heads)
    new = np.random.default_rng(5).integers(0, 97, (6, steps)).astype(np.int32)
    ones = np.ones(6, int)
    logits = np.stack([feed_tokens(model, split_layers(backbone), cache, new[:, i : i + 1], ones) for i in range(steps)], axis=1)
    for row, text in enumerate(texts):
        expected = whole(model, backbone, np.concatenate([text, new[row]]), heads[:, row])[len(text) :]
        np.testing.assert_allclose(logits[row], expected, atol=2e-5 * np.abs(expected).max())
    if setting == "fa_ssa":
        other = whole(model, backbone, np.concatenate([texts[5], new[5]]), 1 - heads[:, 5])[128:]
        assert np.abs(other - logits[5]).max() > 0.05 * np.abs(other).max()  # the decisions matter here


def test_a_step_after_prefill_is_prefilling_one_token_more():
    model, backbone, _ = lively_model()
    texts = prompts(1, 15, 16, 47, 48, 127)
    heads, new = decisions(6), np.arange(6, dtype=np.int32)[:, None]
    cache, _ = start(model, backbone, texts, heads)
    stepped = feed_tokens(model, split_layers(backbone), cache, new, np.ones(6, int))
    longer = [np.concatenate([text, token]) for text, token in zip(texts, new)]
    longer_cache = open_cache(model, longer)
    at_once = prefill(model, split_layers(backbone), None, longer, turns(longer), longer_cache, heads=heads).logits
    np.testing.assert_allclose(stepped, at_once, atol=2e-5 * float(jnp.abs(at_once).max()))
    np.testing.assert_array_equal(cache.lengths, longer_cache.lengths)


def test_greedy_text_is_that_of_the_whole_model():
    model, backbone, _ = lively_model()
    texts, heads = TEXTS, decisions(6)
    tokens, cache, _ = generate(model, backbone, texts, heads, steps=60)
    assert len(set(tokens.ravel().tolist())) > 40  # varied text
    for row, text in enumerate(texts):
        logits = whole(model, backbone, np.concatenate([text, tokens[row]]), heads[:, row])
        np.testing.assert_array_equal(tokens[row], logits[len(text) - 1 : -1].argmax(-1))
    np.testing.assert_array_equal(cache.lengths, [len(text) + 60 for text in texts])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_padding_and_pauses_change_no_token(temperature):
    model, backbone, _ = lively_model()
    texts, heads = TEXTS, decisions(6)
    run = lambda rows, **options: generate(
        model, backbone, [texts[r] for r in rows], heads[:, rows], sampling=greedy(0, [r + 3 for r in rows], temperature), **options
    )[0]
    together = run([0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(run([0, 1, 2, 3, 4, 5], at_once=7), together)
    np.testing.assert_array_equal(run([5, 4, 3, 2, 1, 0])[::-1], together)
    np.testing.assert_array_equal(run([5, 1]), together[[5, 1]])
    np.testing.assert_array_equal(run([5])[0], together[5])
    if temperature:
        same, other = (
            generate(model, backbone, [texts[5]] * 2, heads[:, [5, 5]], sampling=greedy(0, seeds, temperature))[0]
            for seeds in ([1, 1], [1, 2])
        )
        np.testing.assert_array_equal(same[0], same[1])
        np.testing.assert_array_equal(same[0], other[0])
        assert not np.array_equal(other[0], other[1])


def test_a_stop_token_ends_its_sequence_alone():
    model, backbone, _ = lively_model()
    texts, heads = TEXTS, decisions(6)
    free = generate(model, backbone, texts, heads)[0]
    stops = np.full((6, 2), -1, np.int32)
    stops[1, 1], stops[4, 0] = free[1, 10], free[4, 0]
    first = np.flatnonzero(free[1] == stops[1, 1])[0]
    tokens, cache, state = generate(model, backbone, texts, heads, stops=stops)
    np.testing.assert_array_equal(state.done, [False, True, False, False, True, False])
    for row in (0, 2, 3, 5):
        np.testing.assert_array_equal(tokens[row], free[row])
    np.testing.assert_array_equal(tokens[1, : first + 1], free[1, : first + 1])
    # What was chosen last is not in the cache.
    np.testing.assert_array_equal(cache.lengths, [1 + 40, 15 + first, 16 + 40, 47 + 40, 96, 128 + 40])
    everything = np.arange(97, dtype=np.int32)[None]
    cache, state = start(model, backbone, texts, heads, stops=everything)
    assert np.asarray(state.done).all()
    assert generate_tokens(model, split_layers(backbone), cache, state, greedy(6), np.broadcast_to(everything, (6, 97)), 5)[1].shape == (
        6,
        0,
    )


def test_given_tokens_may_differ_in_number():
    model, backbone, _ = lively_model()
    texts, heads = TEXTS, decisions(6)
    new = np.random.default_rng(1).integers(0, 97, (6, 32)).astype(np.int32)
    counts = np.array([1, 32, 5, 17, 18, 31])
    cache, _ = start(model, backbone, texts, heads)
    logits = feed_tokens(model, split_layers(backbone), cache, new, counts)
    for row, text in enumerate(texts):
        expected = whole(model, backbone, np.concatenate([text, new[row, : counts[row]]]), heads[:, row])[-1]
        np.testing.assert_allclose(logits[row], expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(cache.lengths, [len(text) for text in texts] + counts)


def test_a_freed_sequence_is_refused_and_others_go_on():
    model, backbone, _ = lively_model()
    texts, heads = TEXTS, decisions(6)
    expected = generate(model, backbone, texts, heads, steps=10)[0]
    cache, state = start(model, backbone, texts, heads)
    cache.free(2)
    with pytest.raises(ValueError, match=r"sequences \[2\] of this cache were freed"):
        generate_tokens(model, split_layers(backbone), cache, state, greedy(6), np.broadcast_to(NEVER, (6, 1)), 10)
    state = dataclasses.replace(state, done=jnp.arange(6) == 2)
    _, tokens = generate_tokens(model, split_layers(backbone), cache, state, greedy(6), np.broadcast_to(NEVER, (6, 1)), 10)
    rows = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(tokens[rows], expected[rows, 1:])


def test_one_program_for_any_number_of_steps_and_nothing_closed_over():
    model, backbone, _ = lively_model()
    texts, heads = TEXTS, decisions(6)
    generate(model, backbone, texts, heads)
    before = decoding._run._cache_size()
    generate(model, backbone, texts, heads, at_once=9)
    generate(model, backbone, texts, heads, sampling=greedy(6, temperature=0.5), steps=40)
    assert decoding._run._cache_size() == before
    cache, state = start(model, backbone, texts, heads)
    arguments = (
        model,
        split_layers(backbone),
        cache.pool.pages,
        cache.tables(),
        state,
        greedy(6),
        np.broadcast_to(NEVER, (6, 1)),
        np.int32(5),
    )
    constants = jax.make_jaxpr(decoding._run, static_argnums=0)(*arguments).consts
    assert max((np.size(constant) for constant in constants), default=0) <= SPARSITY.block_size
