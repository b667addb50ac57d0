"""Hugging Face folders in and out, and what a damaged or foreign one is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from elastic_jax.models import Decoder, ModelConfig
from elastic_jax.weights import load_model, save_safetensors
from elastic_jax.weights.safetensors import load_safetensors
from tests.tiny_models import jax_logits, random_tokens, torch_logits, torch_model


@pytest.fixture(scope="module")
def model() -> object:
    return torch_model("qwen3", tied=True)


@pytest.fixture
def folder(model: object, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def _change(folder: Path, change: object) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_shards_load_as_the_whole(model: object, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    states = [nnx.state(load_model(path, dtype=jnp.float32).decoder) for path in (folder, sharded)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtype_is_the_one_asked_for(dtype: object, folder: Path) -> None:
    loaded = load_model(folder, dtype=dtype).decoder
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(loaded))} == {jnp.dtype(dtype)}
    stored = load_file(folder / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    np.testing.assert_array_equal(loaded.layers.mlp.down[...][2], stored.astype(jnp.dtype(dtype)))


def test_bfloat16_files_load(model: object, folder: Path) -> None:
    _change(folder, lambda tensors: tensors.update({name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}))
    scale = load_model(folder, dtype=jnp.float32).decoder.final_norm.scale[...]
    np.testing.assert_array_equal(scale, model.model.norm.weight.detach().bfloat16().float().numpy())


@pytest.mark.parametrize(("model_type", "rope", "tied"), [("qwen3", "yarn", True), ("llama", "llama3", False), ("qwen2", "default", False)])
def test_transformers_reads_what_is_written(model_type: str, rope: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch_model(model_type, rope=rope, tied=tied).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", dtype=jnp.float32)
    save_safetensors(ours.decoder, tmp_path / "ours")
    again = load_model(tmp_path / "ours", dtype=jnp.float32)
    assert again.config == ours.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again.decoder), nnx.state(ours.decoder))

    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    tokens = random_tokens()
    np.testing.assert_allclose(jax_logits(ours.decoder, tokens), torch_logits(back, tokens), atol=3e-5)


def test_bfloat16_is_written_as_such(folder: Path, tmp_path: Path) -> None:
    save_safetensors(load_model(folder, dtype=jnp.bfloat16).decoder, tmp_path / "ours")
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {jnp.dtype(jnp.bfloat16)}
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_no_model_type_describes_is_not_written(tmp_path: Path) -> None:
    import dataclasses

    config = dataclasses.replace(ModelConfig.from_hf(torch_model("qwen3").config.to_dict()), attention_bias=True)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32))
    with pytest.raises(ValueError, match="no Hugging Face model type"):
        save_safetensors(decoder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_harmless_extras_are_ignored(folder: Path) -> None:
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "lm_head.weight": np.ones((97, 32), np.float32)}
    _change(folder, lambda tensors: tensors.update(extras))
    load_model(folder)


def test_all_tensors_that_do_not_fit_are_listed_at_once(folder: Path) -> None:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.layers.0.mlp.gate_proj.weight"] = np.ones((48, 31), np.float32)
        tensors["model.layers.3.mlp.gate_proj.weight"] = np.ones((48, 32), np.float32)
        tensors["visual.proj"] = np.ones(2, np.float32)

    _change(folder, damage)
    with pytest.raises(ValueError, match="does not hold the model") as caught:
        load_model(folder)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: model.norm.weight (32,)",
        "  missing: model.layers.1.self_attn.q_proj.weight (64, 32)",
        "  unexpected: model.layers.3.mlp.gate_proj.weight (48, 32)",
        "  unexpected: visual.proj (2,)",
        "  wrong shape: model.layers.0.mlp.gate_proj.weight is (48, 31), the configuration says (48, 32)",
    ]


def test_an_absurd_number_of_layers_fails_at_once(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1_000_000_000, "layer_types": None}))
    with pytest.raises(ValueError, match=r"holds \d+ tensors: too few for the 1000000000 layers"):
        load_model(folder)


def test_untied_model_without_head_is_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        load_model(folder)


def test_quantized_tensors_are_refused(folder: Path) -> None:
    _change(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(ValueError, match="model.norm.weight has dtype I8: accepted are F64, F32, F16, BF16"):
        load_model(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: whole[:-1], "not fully covered"),
        (lambda whole: whole[:100], "invalid header length"),
        (lambda whole: b"", "header too small"),
        (lambda whole: whole[:8] + b"?" + whole[9:], "invalid JSON"),
    ],
)
def test_damaged_file_is_named(damage: object, reason: str, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=reason) as caught:
        load_safetensors(folder, dtype=jnp.float32)
    assert str(path) in str(caught.value)
    assert "truncated or not a safetensors file" in str(caught.value)


def test_shards_must_all_be_there_once(model: object, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(ValueError, match=f"shards that are not in the folder: {second.name}"):
        load_model(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="is in another shard too"):
        load_model(tmp_path)
    second.write_bytes(kept)
    load_model(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_damaged_index_is_named(text: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json.* (is not JSON|an object.* is needed)"):
        load_model(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(folder)
