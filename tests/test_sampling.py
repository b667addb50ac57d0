"""Sampling: the distribution that is drawn from, its edges, and what a draw depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_jax.sampling import Sampling, filtered, sample

LOGITS = np.log(np.array([0.05, 0.3, 0.02, 0.2, 0.2, 0.1, 0.08, 0.05], np.float32))
SAMPLE = jax.jit(sample)


def draw(logits, count=1, temperature=1.0, top_k=0, top_p=1.0, seeds=None, position=7, stops=(-1,), first_stop=0):
    seeds = np.arange(count) if seeds is None else np.asarray(seeds)
    rows = lambda values: np.broadcast_to(np.asarray(values), (len(seeds), np.size(values)))
    first_stop = np.broadcast_to(np.int32(first_stop), len(seeds))
    options = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p), seeds.astype(np.uint32), first_stop)
    return np.asarray(SAMPLE(rows(logits), np.full(len(seeds), position, np.int32), options, rows(stops)))


def kept(p, temperature, top_k, top_p):
    """The definition, one token at a time in float64: probabilities of each token id."""
    p = p.astype(np.float64) ** (1 / temperature)
    order = sorted(range(p.size), key=lambda i: (-p[i], i))[: top_k or None]
    p /= p[order].sum()
    chosen, total = [], 0.0
    for i in order:
        if chosen and total >= top_p:
            break
        chosen.append(i)
        total += p[i]
    result = np.zeros(p.size)
    result[chosen] = p[chosen] / total
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (2.0, 4, 1.0), (1.0, 0, 0.65), (1.5, 5, 0.8), (1.0, 3, 0.3), (1.0, 99, 0.999)],
)
def test_frequencies_are_those_of_the_definition(temperature, top_k, top_p):
    count = 20_000
    tokens = draw(LOGITS, count, temperature, top_k, top_p)
    p = kept(np.exp(LOGITS), temperature, top_k, top_p)
    frequency = np.bincount(tokens, minlength=p.size) / count
    assert not frequency[p == 0].any()
    np.testing.assert_allclose(frequency, p, atol=4 * 0.5 / np.sqrt(count))  # 4 standard errors


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1, 1, 2, 3, 5, 20]), min_size=8, max_size=8),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.01, 1.0),
)
def test_what_may_be_drawn(weights, temperature, top_k, top_p):
    """Ties included: k of equals are exactly k, and the fewest tokens reach top_p."""
    p = np.array(weights, np.float64) / sum(weights)
    ranked = np.sort(p)[::-1]
    expected = kept(ranked, temperature, top_k, top_p)
    cumulative = np.cumsum(kept(ranked, temperature, top_k, 1.0))
    if np.abs(cumulative - top_p).min() < 1e-5:
        return  # a border that rounding may move
    actual = jax.nn.softmax(filtered(jnp.log(jnp.asarray(ranked, jnp.float32)), temperature, top_k, top_p))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}, {"temperature": 1e-3}])
def test_the_best_token_alone(options):
    assert (draw(LOGITS, 200, **options) == 1).all()
    tied = np.array([0.0, 40.0, 40.0, -3.0], np.float32)
    if options.get("temperature", 1.0) in (0.0, 1.0):  # nothing but the choice of one resolves a tie
        assert (draw(tied, 200, **options) == 1).all()
    else:
        assert set(draw(tied, 200, **options)) == {1, 2}


def test_ties_at_the_border_of_top_k():
    assert set(draw(np.zeros(6, np.float32), 400, top_k=2)) == {0, 1}


def test_a_long_tail_can_be_drawn():
    """50,000 equal tokens: no rounding of sums cuts the last ones off."""
    tokens = draw(np.zeros(50_000, np.float32), 64)
    assert tokens.max() > 45_000
    assert len(set(tokens)) > 60


def test_a_draw_depends_on_seed_position_and_logits_only():
    alone = draw(LOGITS, seeds=[5])
    assert draw(LOGITS, seeds=[1, 2, 5, 9])[2] == alone[0]
    by_position = [draw(LOGITS, seeds=[5], position=p)[0] for p in range(40)]
    by_seed = draw(LOGITS, seeds=range(40))
    assert len(set(by_position)) > 3
    assert len(set(by_seed)) > 3
    np.testing.assert_array_equal(by_seed, draw(LOGITS, seeds=range(40)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_before_its_time(temperature):
    """Of each sequence by itself; the others' tokens are the same bits."""
    options = {"temperature": temperature, "seeds": range(400)}
    free = draw(LOGITS, **options)
    tokens = draw(LOGITS, stops=(1, 4, -1, -1), first_stop=np.where(np.arange(400) % 2, 8, 7), **options)
    np.testing.assert_array_equal(tokens[::2], free[::2])
    assert set(free[1::2]) & {1, 4}
    assert set(tokens[1::2]) == ({3} if temperature == 0 else {0, 2, 3, 5, 6, 7})
