"""The routed model: it equals plain attention where it must, and neither padding nor neighbours change a pack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from elastic_jax.config import SparsityConfig
from elastic_jax.data.batch import stack_packs
from tests.tiny import BLOCK, SPARSITY, SyntheticPacks, tiny_model


def dense_attend(batch):
    """Plain causal attention within documents, no blocks and no kernels."""
    block_document = np.repeat(np.asarray(batch.document), BLOCK, axis=1)
    tokens = block_document.shape[1]
    allowed = (block_document[:, :, None] == block_document[:, None, :]) & np.tril(np.ones((tokens, tokens), bool))

    def attend(q, k, v, keys, extra):
        group = q.shape[2] // k.shape[2]
        scores = jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, group, axis=2)) * q.shape[3] ** -0.5
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("BNTS,BSNH->BTNH", weights, jnp.repeat(v, group, axis=2)), None

    return attend


def real_tokens(batch):
    """bool[B, T]: tokens that are not padding."""
    inside = np.zeros(np.shape(batch.tokens), bool)
    for row, spans in enumerate(batch.span):
        for start, end in spans:
            inside[row, start:end] = True
    return inside


def packs(*numbers):
    source = SyntheticPacks()
    return stack_packs([source.pack(number) for number in numbers])


def decisions(model, batch, value):
    shape = (model.config.num_layers, *batch.task.shape, model.config.num_kv_heads)
    return jnp.full(shape, value, jnp.float32)


def test_all_full_is_plain_attention():
    model, backbone = tiny_model()
    batch = packs(0, 1)
    hidden = model.forced_forward(backbone, batch, decisions(model, batch, 1)).hidden
    want, _ = nnx.merge(model.decoder, backbone).hidden_states(batch.tokens, batch.positions, dense_attend(batch))
    inside = real_tokens(batch)
    np.testing.assert_allclose(hidden[inside], want[inside], atol=2e-5)


@pytest.mark.parametrize("setting", ["fa_ssa", "fa_xa", "xa_ssa"])
def test_a_budget_that_covers_everything_is_plain_attention(setting):
    sparsity = SparsityConfig(setting=setting, block_size=BLOCK, sink_tokens=BLOCK, local_tokens=4096, xattn_stride=4, xattn_threshold=1.0)
    model, backbone = tiny_model(sparsity=sparsity)
    batch = packs(2)
    full, mixed = (model.forced_forward(backbone, batch, decisions(model, batch, value)) for value in (1, 0))
    inside = real_tokens(batch)
    np.testing.assert_allclose(full.hidden[inside], mixed.hidden[inside], atol=2e-5)
    np.testing.assert_allclose(mixed.effective_sparsity, 0, atol=1e-6)


def test_sparse_heads_change_the_result_and_are_measured():
    model, backbone = tiny_model()
    batch = packs(0)
    full, sparse = (model.forced_forward(backbone, batch, decisions(model, batch, value)) for value in (1, 0))
    assert float(jnp.abs(full.hidden - sparse.hidden).max()) > 1e-3
    assert (np.asarray(sparse.effective_sparsity) > 0).any()
    assert not np.asarray(full.effective_sparsity).any()


@pytest.mark.parametrize("setting", ["fa_ssa", "fa_xa", "xa_ssa"])
def test_neighbours_in_the_batch_change_nothing(setting):
    model, backbone = tiny_model(sparsity=dataclasses.replace(SPARSITY, setting=setting))
    router = jax.tree.map(lambda x: x * 30, model.init_router(jax.random.key(1)))
    forward = jax.jit(lambda batch: model.training_forward(router, backbone, batch, key=jax.random.key(5), temperature=1.0))
    hidden, routing = forward(packs(3, 4, 5))
    assert 0 < float(routing.is_full.mean()) < 1
    for row, number in enumerate((3, 4, 5)):
        alone_hidden, alone = forward(packs(number))
        np.testing.assert_array_equal(alone.is_full[:, 0], routing.is_full[:, row])
        np.testing.assert_allclose(alone_hidden[0], hidden[row], atol=2e-5)


@pytest.mark.parametrize("setting", ["fa_ssa", "fa_xa", "xa_ssa"])
def test_tokens_of_the_padding_change_nothing(setting):
    model, backbone = tiny_model(sparsity=dataclasses.replace(SPARSITY, setting=setting))
    router = jax.tree.map(lambda x: x * 30, model.init_router(jax.random.key(1)))
    batch = packs(6)
    inside = real_tokens(batch)
    assert not inside.all()
    other = dataclasses.replace(batch, tokens=np.where(inside, batch.tokens, 96).astype(np.int32))
    one, two = (model.routed_forward(router, backbone, b) for b in (batch, other))
    np.testing.assert_array_equal(one.is_full, two.is_full)
    np.testing.assert_array_equal(one.hidden[inside], two.hidden[inside])


def test_documents_of_a_pack_do_not_see_each_other():
    model, backbone = tiny_model()
    router = jax.tree.map(lambda x: x * 30, model.init_router(jax.random.key(1)))
    batch = packs(7)
    second = int(batch.span[0, 1, 0])
    tokens = np.array(batch.tokens)
    tokens[0, second:] = (tokens[0, second:] + 1) % 97
    one, two = (model.routed_forward(router, backbone, b) for b in (batch, dataclasses.replace(batch, tokens=tokens)))
    np.testing.assert_array_equal(one.hidden[0, :second], two.hidden[0, :second])
    np.testing.assert_array_equal(one.is_full[:, :, 0], two.is_full[:, :, 0])


def test_every_array_of_the_router_gets_a_gradient_from_the_language_loss():
    model, backbone = tiny_model()
    batch = packs(0)
    router = model.init_router(jax.random.key(0))

    def language(router):
        hidden, _ = model.training_forward(router, backbone, batch, key=jax.random.key(0), temperature=1.0)
        return jnp.square(hidden).sum()

    gradient = jax.grad(language)(router)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient))
