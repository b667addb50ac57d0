"""The decoder: equal to transformers for each family and RoPE type, and the seam that attention, routers and caches rely on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from elastic_jax.models import Decoder, ModelConfig, preset
from elastic_jax.weights import load_model
from tests.tiny_models import ROPES, dense_attend, jax_logits, random_tokens, torch_logits, torch_model

TINY = dataclasses.replace(
    preset("qwen3_8b"), vocab_size=97, hidden_size=32, mlp_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    with jax.default_matmul_precision("float32"):
        yield


def _decoder(dtype: Any = jnp.float32, config: ModelConfig = TINY) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype)


def _positions(tokens: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


@pytest.mark.parametrize(
    ("model_type", "rope", "tied"),
    [("qwen3", rope, True) for rope in ROPES]
    + [("llama", rope, False) for rope in ROPES]
    + [("qwen3", "default", False), ("llama", "default", True), ("qwen2", "yarn", False)],
)
def test_logits_are_those_of_transformers(model_type: str, rope: str, tied: bool, tmp_path: Path) -> None:
    theirs = torch_model(model_type, rope=rope, tied=tied)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=jnp.float32)
    assert ours.config.rope.kind == rope
    assert ours.config.tie_embeddings == tied
    tokens = random_tokens()
    expected = torch_logits(theirs, tokens)
    assert expected.std() > 1.0  # the tolerance means something
    np.testing.assert_allclose(jax_logits(ours.decoder, tokens), expected, atol=3e-5)  # measured: 7e-6


def test_bfloat16_stays_close_to_float32() -> None:
    tokens = random_tokens()
    exact = _decoder()
    graphdef, state = nnx.split(exact)
    rounded = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    hidden, _ = jax.eval_shape(lambda: rounded.hidden_states(jnp.asarray(tokens), _positions(tokens), dense_attend))
    assert hidden.dtype == jnp.bfloat16
    actual, expected = jax_logits(rounded, tokens), jax_logits(exact, tokens)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=0.05 * float(np.std(expected)))


def test_positions_place_tokens() -> None:
    """Two documents packed into one row, positions restarting, are the two documents on their own."""
    decoder, tokens = _decoder(), random_tokens(1, 32)
    document = jnp.arange(32) // 16

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, extra: Any) -> tuple[jax.Array, None]:
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q.reshape(1, 32, 2, 2, 16), k) / 4.0
        allowed = jnp.tril(document[:, None] == document[None, :])
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(q.shape), None

    packed = jax.jit(lambda: decoder.logits(decoder.hidden_states(jnp.asarray(tokens), _positions(tokens) % 16, attend)[0]))()
    separate = jax_logits(decoder, tokens.reshape(2, 16))
    np.testing.assert_allclose(packed.reshape(separate.shape), separate, atol=1e-5)


def test_each_layer_gets_its_slice_and_its_aux_is_stacked() -> None:
    decoder, tokens = _decoder(), random_tokens()

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, extra: Any) -> tuple[jax.Array, Any]:
        out, _ = dense_attend(q, k, v, keys, None)
        return out * extra["gain"], {"gain": extra["gain"], "noise": jax.random.uniform(extra["key"]), "heads": keys.shape[2]}

    per_layer = {"gain": jnp.array([1.0, 2.0, 3.0]), "key": jax.random.split(jax.random.key(0), 3)}
    _, aux = decoder.hidden_states(jnp.asarray(tokens), _positions(tokens), attend, per_layer)
    np.testing.assert_array_equal(aux["gain"], per_layer["gain"])
    np.testing.assert_array_equal(aux["noise"], [jax.random.uniform(key) for key in per_layer["key"]])
    np.testing.assert_array_equal(aux["heads"], [2, 2, 2])


@pytest.mark.parametrize("name", ["qwen3_8b", "llama3_2_1b"])
def test_keys_before_rope(name: str) -> None:
    """Normalised for Qwen3, raw for Llama, and never rotated: equal to the keys of a row whose positions are all 0."""
    tokens = random_tokens()
    fields = ("vocab_size", "hidden_size", "mlp_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    config = dataclasses.replace(preset(name), **{field: getattr(TINY, field) for field in fields})
    decoder = _decoder(config=config)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, extra: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros_like(q), (k, keys)

    _, (rotated, before) = decoder.hidden_states(jnp.asarray(tokens), _positions(tokens), attend)
    _, (unrotated, _) = decoder.hidden_states(jnp.asarray(tokens), jnp.zeros_like(_positions(tokens)), attend)
    assert rotated.shape == before.shape == (3, 2, 48, 2, 16)
    np.testing.assert_allclose(before, unrotated, atol=1e-6)
    assert float(jnp.max(jnp.abs(rotated - before))) > 0.01
    mean_square = jnp.mean(jnp.square(before), axis=-1)
    assert config.qk_norm == bool(jnp.allclose(mean_square, 1.0, atol=0.02))


def test_backbone_is_an_argument_of_one_compiled_function() -> None:
    """Weights of another dtype or value reuse the static graph definition; nothing of the model is a constant of the program."""
    tokens = jnp.asarray(random_tokens())

    @functools.partial(jax.jit, static_argnums=0)
    def forward(graphdef: Any, state: Any) -> jax.Array:
        return nnx.merge(graphdef, state).hidden_states(tokens, _positions(tokens), dense_attend)[0]

    first, second = nnx.split(_decoder()), nnx.split(Decoder(TINY, rngs=nnx.Rngs(1), param_dtype=jnp.float32))
    assert first[0] == second[0]
    assert hash(first[0]) == hash(second[0])
    assert not np.allclose(forward(*first), forward(*second))
    assert forward._cache_size() == 1
    constants = jax.make_jaxpr(forward, static_argnums=0)(*first).consts
    assert max((np.size(constant) for constant in constants), default=0) <= tokens.size


def test_backward_pass_does_not_attend_again() -> None:
    """Attention runs once per layer if it names its output; every other operation of the layer is recomputed."""
    decoder, tokens = _decoder(), jnp.asarray(random_tokens())
    runs = []

    @jax.custom_vjp
    def mix(q: jax.Array, v: jax.Array) -> jax.Array:
        return q + jnp.repeat(v, 2, axis=2)

    def mix_forward(q: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        out = jax.pure_callback(lambda x: runs.append(1) or x, jax.ShapeDtypeStruct(q.shape, q.dtype), mix(q, v))
        return checkpoint_name(out, "attention_out"), None

    mix.defvjp(mix_forward, lambda _, g: (g, g.reshape(*g.shape[:2], 2, 2, 16).sum(3)))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, gain: jax.Array) -> tuple[jax.Array, None]:
        return mix(q * gain, v), None

    def loss(gain: jax.Array, **options: Any) -> jax.Array:
        return jnp.sum(decoder.hidden_states(tokens, _positions(tokens), attend, gain, **options)[0])

    counts = {}
    for name, options in {"named": {}, "nothing": {"remat_policy": jax.checkpoint_policies.nothing_saveable}}.items():
        runs.clear()
        jax.block_until_ready(jax.jit(jax.grad(functools.partial(loss, **options)))(jnp.ones(3)))
        counts[name] = len(runs)
    assert counts == {"named": 3, "nothing": 6}


def test_head_is_tied_or_its_own() -> None:
    untied = _decoder()
    assert untied.output_embedding().shape == (97, 32)
    assert not np.allclose(untied.output_embedding(), untied.embedding[...])
    tied = _decoder(config=dataclasses.replace(TINY, tie_embeddings=True))
    assert "head" not in nnx.to_pure_dict(nnx.state(tied))
    np.testing.assert_array_equal(tied.output_embedding(), tied.embedding[...])


def test_layers_start_different() -> None:
    gate = np.asarray(_decoder().layers.mlp.gate[...])
    assert gate.shape == (3, 48, 32)
    assert not np.allclose(gate[0], gate[1])
    assert gate.std() == pytest.approx(0.02, rel=0.05)
