"""Held-out evaluation: conditions, random routing, and that batching changes no score."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from elastic_jax.evaluation.heldout import HeldoutScorer, evaluate_heldout, heldout_batches, random_decisions, report_table
from tests.tiny import SyntheticPacks, tiny_model


@settings(max_examples=20, deadline=None)
@given(layers=st.integers(1, 5), heads=st.integers(1, 4), seed=st.integers(0, 99))
def test_random_decisions_have_exactly_the_sparsity_asked_for(layers, heads, seed):
    rng = np.random.default_rng(seed)
    sparse = rng.integers(0, layers * heads + 1, 7)
    decisions = random_decisions(sparse, layers, heads, rng)
    np.testing.assert_array_equal((~decisions).sum(axis=(1, 2)), sparse)


def test_random_decisions_are_uniform_over_heads():
    decisions = random_decisions(np.full(4000, 3), 2, 3, np.random.default_rng(0))
    np.testing.assert_allclose(decisions.mean(axis=0), 0.5, atol=0.05)


def packs(count=5, answer=4):
    """One document per pack; the last `answer` predictions count."""
    result = []
    for number in range(count):
        pack = SyntheticPacks(tokens=96).pack(number)
        first = slice(0, 1)
        end = int(pack.span[0, 1])
        weights = np.zeros_like(pack.loss_weights)
        weights[end - 1 - answer : end - 1] = 1
        document = np.where(pack.document == 0, 0, -1).astype(np.int32)
        result.append(
            dataclasses.replace(
                pack,
                loss_weights=weights,
                document=document,
                task=np.array([number % 2], np.int32),
                span=pack.span[first],
                user_turn=pack.user_turn[first],
            )
        )
    return result


def scorer(batch_size, count=5):
    model, backbone = tiny_model()
    router = jax.tree.map(lambda x: x * 30, model.init_router(jax.random.key(1)))  # strong enough to route both ways
    kinds = ["needle" if number % 4 == 0 else "" for number in range(count)]
    return HeldoutScorer(model, backbone, router, heldout_batches(packs(count), kinds, batch_size))


def test_scores_do_not_depend_on_the_batch_size():
    one, three = scorer(1).routed(), scorer(3).routed()
    np.testing.assert_allclose(one.loss, three.loss, rtol=1e-5)
    np.testing.assert_array_equal(one.is_full, three.is_full)
    np.testing.assert_allclose(one.effective_sparsity, three.effective_sparsity, rtol=1e-6)


def test_forcing_the_routers_decisions_gives_the_routers_scores():
    s = scorer(2)
    routed = s.routed()
    assert 0 < routed.sparsity.mean() < 1
    forced = s.forced(routed.is_full)
    np.testing.assert_allclose(forced.loss, routed.loss, rtol=1e-6)
    np.testing.assert_array_equal(forced.is_full, routed.is_full)


def test_the_dial_reaches_both_ends():
    s = scorer(2)
    assert s.routed(np.inf).sparsity.max() == 0
    assert s.routed(-np.inf).sparsity.min() == 1
    full = s.forced(np.ones((5, 3, 2), bool))
    np.testing.assert_allclose(s.routed(np.inf).loss, full.loss, rtol=1e-6)
    assert not full.effective_sparsity.any()


def test_report():
    report = evaluate_heldout(scorer(2), random_seeds=2, seed=0)
    assert list(report["classes"]) == ["single_qa", "multihop_qa"]
    single = report["classes"]["single_qa"]
    assert single["documents"] == 3
    assert single["needle"]["documents"] == 2
    assert "needle" not in report["classes"]["multihop_qa"]
    assert single["router_gain"] == pytest.approx(single["loss"]["random"] - single["loss"]["router"], abs=1e-6)
    assert np.shape(report["heads"]["all"]) == (3, 2)
    assert np.mean(report["heads"]["single_qa"]) == pytest.approx(1 - single["msr"])
    lines = report_table(report).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


def test_random_routing_is_as_sparse_as_the_router(monkeypatch):
    given = []
    forced = HeldoutScorer.forced
    monkeypatch.setattr(HeldoutScorer, "forced", lambda self, is_full: given.append(is_full) or forced(self, is_full))
    report = evaluate_heldout(scorer(2), random_seeds=2, seed=0)
    tasks = np.arange(5) % 2
    assert len(given) == 4  # full, sparse, two draws
    for draw in given[2:]:
        for number, name in enumerate(("single_qa", "multihop_qa")):
            assert 1 - draw[tasks == number].mean() == pytest.approx(report["classes"][name]["msr"], abs=0.51 / 6)
    assert not np.array_equal(given[2], given[3])


def test_the_dial_moves_the_report():
    dense = evaluate_heldout(scorer(2), random_seeds=1, seed=0, logit_bias=1e9)
    assert all(c["msr"] == 0 for c in dense["classes"].values())
