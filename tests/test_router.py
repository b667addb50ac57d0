"""The router: parameter count, pooling, straight-through sampling, inference, temperatures."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

from elastic_jax.config import RouterConfig
from elastic_jax.router import (
    AttentionRouter,
    RouterParam,
    choose_routing,
    cosine_temperature,
    exponential_temperature,
    pool_keys,
    straight_through,
)


def sample(logits, key, temperature):
    return straight_through(logits, jax.random.gumbel(key, logits.shape), temperature)


def make(head_dim=128, **config):
    return AttentionRouter(head_dim, RouterConfig(**config), rngs=nnx.Rngs(params=0))


@pytest.mark.parametrize(("width", "count"), [(2, 132_098), (4, 263_682), (6, 395_266), (8, 526_850)])
def test_parameter_count(width, count):
    state = nnx.state(make(width=width), RouterParam)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == count


def test_initialisation_routes_half_the_heads_in_training():
    router = make()
    kernels = np.concatenate([np.ravel(x[...]) for x in (router.task_hidden.kernel, router.router_hidden.kernel)])
    assert abs(kernels.std() - 0.02) < 2e-4
    assert not np.any(router.router_out.bias[...])
    logits = router(jax.random.normal(jax.random.key(1), (4000, 128)))
    assert abs(float(sample(logits, jax.random.key(2), 1.0).is_full.mean()) - 0.5) < 0.04


def naive_pool(keys, start, end, count):
    tokens = sorted(set(range(start, min(start + count, end))) | set(range(max(end - count, start), end)))
    return keys[tokens].mean(axis=0) if tokens else np.zeros(keys.shape[1:])


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 40), length=st.integers(0, 60), count=st.integers(1, 20), seed=st.integers(0, 99))
def test_boundary_pooling_counts_each_token_once(start, length, count, seed):
    keys = np.random.default_rng(seed).normal(size=(1, 100, 2, 4)).astype(np.float32)
    turn = np.array([[[start, start + length], [0, 0]]])
    pooled = pool_keys(keys, turn, turn, RouterConfig(boundary_tokens=count))
    np.testing.assert_allclose(pooled[0, 0], naive_pool(keys[0], start, start + length, count), atol=1e-6)
    assert not np.any(pooled[0, 1])


@pytest.mark.parametrize(("pooling", "tokens"), [("user_turn", slice(3, 9)), ("sequence", slice(2, 12))])
def test_range_pooling(pooling, tokens):
    keys = np.random.default_rng(0).normal(size=(1, 16, 2, 4)).astype(np.float32)
    keys[:, 12:] = np.nan  # padding must not be read
    pooled = pool_keys(keys, np.array([[[3, 9]]]), np.array([[[2, 12]]]), RouterConfig(pooling=pooling))
    np.testing.assert_allclose(pooled[0, 0], keys[0, tokens].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("pooling", ["boundary", "user_turn", "sequence"])
def test_pooling_ignores_other_documents(pooling):
    keys = np.random.default_rng(0).normal(size=(1, 64, 2, 4)).astype(np.float32)
    ranges = np.array([[[0, 20], [32, 60]]])
    alone = pool_keys(keys, ranges[:, :1], ranges[:, :1], RouterConfig(pooling=pooling))
    changed = keys.copy()
    changed[:, 32:] *= 7
    together = pool_keys(changed, ranges, ranges, RouterConfig(pooling=pooling))
    np.testing.assert_array_equal(alone[0, 0], together[0, 0])


def test_sampling_is_hard_forward_and_soft_backward():
    logits = jnp.array([[0.3, -0.2], [2.0, -2.0], [-1.0, 1.5]])
    key, temperature = jax.random.key(3), 1.3
    routing = sample(logits, key, temperature)
    assert set(np.unique(routing.is_full)) <= {0.0, 1.0}
    noisy = logits + jax.random.gumbel(key, logits.shape)
    np.testing.assert_array_equal(routing.is_full, np.argmax(noisy, axis=-1))
    got = jax.grad(lambda x: sample(x, key, temperature).is_full.sum())(logits)
    want = jax.grad(lambda x: jax.nn.softmax((x + jax.random.gumbel(key, x.shape)) / temperature)[:, 1].sum())(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_sampling_frequency_does_not_depend_on_temperature():
    logits = jnp.broadcast_to(jnp.array([0.0, 0.8]), (20_000, 2))
    share = [float(sample(logits, jax.random.key(0), t).is_full.mean()) for t in (0.1, 5.0)]
    assert share[0] == share[1]
    assert abs(share[0] - float(jax.nn.sigmoid(0.8))) < 0.01


def test_inference_is_argmax_with_a_dial():
    logits = jnp.array([[1.0, 1.0], [0.0, 0.5], [0.5, 0.0]])
    assert choose_routing(logits).is_full.tolist() == [0, 1, 0]  # a tie is sparse
    assert choose_routing(logits, 0.6).is_full.tolist() == [1, 1, 1]
    assert choose_routing(logits, -jnp.inf).is_full.tolist() == [0, 0, 0]


def test_temperature_schedules():
    cosine = [float(cosine_temperature(p, start=1.5, end=1.0)) for p in (0, 0.15, 0.3, 0.45, 0.6, 1.0)]
    np.testing.assert_allclose(cosine, [1.5, 1.427, 1.25, 1.073, 1.0, 1.0], atol=1e-3)  # reference: 1.5, 1.43, 1.25, 1.07, 1.0
    exponential = [float(exponential_temperature(p, start=1.5, end=1.0)) for p in (0, 0.5, 1.0)]
    np.testing.assert_allclose(exponential, [1.5, 1.5 * np.exp(-0.3), 1.0], rtol=1e-6)


def test_bad_configuration_is_named():
    with pytest.raises(ValueError, match="pooling='mean'.*boundary"):
        RouterConfig(pooling="mean")
    with pytest.raises(ValueError, match="boundary_tokens=0"):
        RouterConfig(boundary_tokens=0)
