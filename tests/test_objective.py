"""The objective: chunked loss against the plain one, its memory, the penalty by class, and the multipliers' direction."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

from elastic_jax.data.tasks import TaskClass
from elastic_jax.objective import (
    PenaltyConfig,
    init_multipliers,
    pack_means,
    penalty_deviation,
    sparsity_penalty,
    token_losses,
)
from elastic_jax.optim import OptimizerConfig, make_optimizer, parameter_labels, schedule


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 33), chunk=st.sampled_from([4, 8, 64]), seed=st.integers(0, 99))
def test_chunked_loss_equals_the_plain_one(tokens, chunk, seed):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(2, tokens, 8)).astype(np.float32)
    embedding = rng.normal(size=(11, 8)).astype(np.float32)
    targets = rng.integers(0, 11, (2, tokens))
    weights = rng.integers(0, 2, (2, tokens)).astype(np.float32)

    def plain(x):
        return (optax.softmax_cross_entropy_with_integer_labels(x @ embedding.T, targets) * weights).sum()

    def chunked(x):
        return (token_losses(x, embedding, targets, chunk=chunk)[0] * weights).sum()

    np.testing.assert_allclose(chunked(hidden), plain(hidden), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(chunked)(hidden), jax.grad(plain)(hidden), atol=1e-5)
    hits = token_losses(hidden, embedding, targets, chunk=chunk)[1]
    np.testing.assert_array_equal(hits, (hidden @ embedding.T).argmax(-1) == targets)


def test_loss_at_65536_tokens_and_151936_words_never_holds_the_logits():
    tokens, vocab, width = 65_536, 151_936, 1024
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    loss = lambda hidden, embedding, targets: token_losses(hidden, embedding, targets)[0].mean()
    compiled = jax.jit(jax.grad(loss)).lower(shape(1, tokens, width), shape(vocab, width), shape(1, tokens, dtype=jnp.int32)).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 0.1 * tokens * vocab * 4  # the float32 logits alone take 39.8 GB


def test_pack_means_of_a_pack_without_weight_is_zero():
    assert pack_means(jnp.ones((2, 3)), jnp.array([[0.0, 0, 0], [1, 1, 0]])).tolist() == [0.0, 1.0]


def test_penalty_by_hand():
    config = PenaltyConfig.from_targets(robust=1.0, sensitive=0.7)
    task = np.array([[TaskClass.SINGLE_QA, TaskClass.SINGLE_QA, TaskClass.CODE, -1]])
    sparsity = np.array([[0.5, 0.9, 0.6, 0.0]], np.float32)
    multipliers = {"lambda1": jnp.array([0.1, 9, 9, 0.3, 9]), "lambda2": jnp.array([0.2, 9, 9, 0.4, 9])}
    penalty, per_document = sparsity_penalty(sparsity, task, multipliers, config)
    single = 0.1 * 0.2 + 0.2 * 0.04  # both documents are 0.2 away
    code = 0.3 * 0.4 + 0.4 * 0.16
    np.testing.assert_allclose(per_document, [[single, single, code, 0.0]], rtol=1e-5)
    np.testing.assert_allclose(penalty, [(single + code) / 2], rtol=1e-5)
    signed = PenaltyConfig.from_targets(kind="signed")
    np.testing.assert_allclose(
        sparsity_penalty(sparsity, task, multipliers, signed)[1][0, :3],
        [-0.1 * 0.2 + 0.2 * 0.04, 0.1 * 0.2 + 0.2 * 0.04, -0.3 * 0.4 + 0.4 * 0.16],
        rtol=1e-5,
    )


def test_no_penalty_between_the_bounds():
    config = PenaltyConfig(lower=(0.6,) * 5, upper=(0.8,) * 5)
    task = np.zeros((1, 4), int)
    deviation = penalty_deviation(np.array([[0.5, 0.6, 0.75, 1.0]], np.float32), task, config)
    np.testing.assert_allclose(deviation, [[-0.1, 0, 0, 0.2]], atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_penalty_of_a_pack_does_not_depend_on_its_neighbours_or_order(seed):
    rng = np.random.default_rng(seed)
    config, multipliers = PenaltyConfig.from_targets(), init_multipliers(jax.random.key(seed))
    task, sparsity = rng.integers(-1, 5, (3, 6)), rng.random((3, 6)).astype(np.float32)
    together = sparsity_penalty(sparsity, task, multipliers, config)[0]
    order = rng.permutation(6)
    for row in range(3):
        alone = sparsity_penalty(sparsity[row : row + 1, order], task[row : row + 1, order], multipliers, config)[0]
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-5)
    assert (together >= 0).all()


def test_bad_bounds_are_named():
    with pytest.raises(ValueError, match="lower=.*exceeds upper"):
        PenaltyConfig(lower=(0.9,) * 5, upper=(0.8,) * 5)
    with pytest.raises(ValueError, match=r"accepted are values in \[0, 1\]"):
        PenaltyConfig.from_targets(robust=1.5)
    with pytest.raises(ValueError, match="penalty='square'"):
        PenaltyConfig.from_targets(kind="square")


def trainable():
    return {"router": {"kernel": jnp.ones((2, 2))}, "multipliers": {"lambda1": jnp.full(5, 0.2), "lambda2": jnp.full(5, 0.2)}}


def test_routers_descend_and_multipliers_ascend():
    optimizer = make_optimizer(OptimizerConfig(steps=10, warmup=0.0, weight_decay=0.0))
    tree = trainable()
    gradient = jax.tree.map(jnp.ones_like, tree)
    updates, _ = optimizer.update(gradient, optimizer.init(tree), tree)
    np.testing.assert_allclose(updates["router"]["kernel"], -5e-4, rtol=1e-4)
    np.testing.assert_allclose(updates["multipliers"]["lambda1"], 1e-3, rtol=1e-4)


def test_weight_decay_shrinks_multipliers_too():
    optimizer = make_optimizer(OptimizerConfig(steps=10, warmup=0.0, weight_decay=0.1))
    tree = trainable()
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, tree), optimizer.init(tree), tree)
    np.testing.assert_allclose(updates["multipliers"]["lambda1"], -1e-3 * 0.1 * 0.2, rtol=1e-4)


def test_a_whole_tree_is_labelled_and_the_backbone_stays():
    tree = {**trainable(), "backbone": {"embedding": jnp.ones((3, 2))}}
    assert jax.tree.leaves(parameter_labels(tree)["backbone"]) == ["frozen"]
    optimizer = make_optimizer(OptimizerConfig(steps=10, warmup=0.0))
    state = optimizer.init(tree)
    trained = sum(x.size for x in jax.tree.leaves(trainable()))
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 2 * trained  # two Adam moments, none of the backbone
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, tree), state, tree)
    assert not np.any(updates["backbone"]["embedding"])


def test_schedule_warms_up_and_travels_as_far_as_the_released_one():
    rates = [float(schedule(OptimizerConfig(), 1e-3)(step)) for step in range(301)]
    assert rates[0] == 0.0
    assert rates[60] == max(rates) == pytest.approx(1e-3)
    assert rates[300] == pytest.approx(0.0, abs=1e-9)
    assert sum(rates) == pytest.approx(0.150, abs=1e-3)  # reference.md: what a multiplier can rise in all
