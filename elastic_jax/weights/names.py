"""Which tensor of a checkpoint is which parameter of the decoder, and the assembly of one from the other.

Parameters keep the order of axes of Hugging Face's checkpoints, so a tensor and a parameter differ in two ways only: heads and head
dimension are one axis in the file, and the layers, one tensor each in the file, are stacked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from elastic_jax.models.config import ModelConfig
from elastic_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorName:
    """Name of a parameter in Hugging Face's and in GGUF files; `{}` is the layer. `heads` is the axis that merges heads and head_dim."""

    hf: str
    gguf: str
    heads: int | None = None


def _layer(hf: str, gguf: str, heads: int | None = None) -> TensorName:
    return TensorName(hf=f"model.layers.{{}}.{hf}", gguf=f"blk.{{}}.{gguf}", heads=heads)


# One table for both families: which of these a model has follows from its configuration.
NAMES: dict[str, TensorName] = {
    "embedding": TensorName(hf="model.embed_tokens.weight", gguf="token_embd.weight"),
    "final_norm.scale": TensorName(hf="model.norm.weight", gguf="output_norm.weight"),
    "head": TensorName(hf="lm_head.weight", gguf="output.weight"),
    "layers.attention_norm.scale": _layer("input_layernorm.weight", "attn_norm.weight"),
    "layers.attention.query": _layer("self_attn.q_proj.weight", "attn_q.weight", heads=0),
    "layers.attention.key": _layer("self_attn.k_proj.weight", "attn_k.weight", heads=0),
    "layers.attention.value": _layer("self_attn.v_proj.weight", "attn_v.weight", heads=0),
    "layers.attention.output": _layer("self_attn.o_proj.weight", "attn_output.weight", heads=1),
    "layers.attention.query_bias": _layer("self_attn.q_proj.bias", "attn_q.bias", heads=0),
    "layers.attention.key_bias": _layer("self_attn.k_proj.bias", "attn_k.bias", heads=0),
    "layers.attention.value_bias": _layer("self_attn.v_proj.bias", "attn_v.bias", heads=0),
    "layers.attention.query_norm.scale": _layer("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "layers.attention.key_norm.scale": _layer("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "layers.mlp_norm.scale": _layer("post_attention_layernorm.weight", "ffn_norm.weight"),
    "layers.mlp.gate": _layer("mlp.gate_proj.weight", "ffn_gate.weight"),
    "layers.mlp.up": _layer("mlp.up_proj.weight", "ffn_up.weight"),
    "layers.mlp.down": _layer("mlp.down_proj.weight", "ffn_down.weight"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where one parameter's tensors are: `tensors` holds one name for each layer, or a single one; `shape` is each tensor's."""

    path: tuple[str, ...]
    tensors: tuple[str, ...]
    shape: tuple[int, ...]


def placements(config: ModelConfig, flat: Mapping[tuple[Any, ...], nnx.Variable], naming: str) -> list[Placement]:
    """The tensors that a checkpoint of this model must hold.

    Args:
      config: the model.
      flat: the decoder's parameters by path.
      naming: "hf" or "gguf".
    """
    result = []
    for path, parameter in flat.items():
        name = NAMES[".".join(path)]
        stacked = path[0] == "layers"
        shape = list(parameter.shape)[1:] if stacked else list(parameter.shape)
        if name.heads is not None:
            shape[name.heads : name.heads + 2] = [shape[name.heads] * shape[name.heads + 1]]
        pattern = getattr(name, naming)
        tensors = tuple(pattern.format(layer) for layer in range(config.num_layers)) if stacked else (pattern,)
        result.append(Placement(path=path, tensors=tensors, shape=tuple(shape)))
    return result


def assemble(
    config: ModelConfig,
    *,
    naming: str,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: jax.typing.DTypeLike,
    source: str,
    ignored: Collection[str] = (),
) -> Decoder:
    """Builds a decoder from a checkpoint's tensors; beside the result, memory holds one stacked parameter at a time.

    Args:
      config: the model.
      naming: "hf" or "gguf".
      shapes: shape of every tensor in the checkpoint, by name.
      read: returns a tensor by name, in any float dtype.
      dtype: of the decoder's parameters.
      source: what to call the checkpoint in an error.
      ignored: regular expressions of names that may be there beside the model's own.

    Raises:
      ValueError: lists all tensors that are missing, left over, or of another shape than the configuration says.
    """
    if config.num_layers > len(shapes):  # a damaged number of layers would be listed for hours
        raise ValueError(f"{source} holds {len(shapes)} tensors: too few for the {config.num_layers} layers of its configuration")
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype)))
    flat = dict(nnx.to_flat_state(abstract))
    wanted = placements(config, flat, naming)
    _check(wanted, shapes, source, ignored)

    loaded = {}
    for placement in wanted:
        parameter = flat[placement.path]
        stacked = np.empty((len(placement.tensors), *placement.shape), parameter.dtype)
        for layer, name in enumerate(placement.tensors):
            stacked[layer] = read(name)
        loaded[placement.path] = parameter.replace(jax.device_put(stacked.reshape(parameter.shape)))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _check(wanted: list[Placement], shapes: Mapping[str, tuple[int, ...]], source: str, ignored: Collection[str]) -> None:
    expected = {name: placement.shape for placement in wanted for name in placement.tensors}
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in shapes]
    problems += [
        f"unexpected: {name} {shape}"
        for name, shape in shapes.items()
        if name not in expected and not any(re.fullmatch(pattern, name) for pattern in ignored)
    ]
    problems += [
        f"wrong shape: {name} is {shapes[name]}, the configuration says {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ValueError(f"{source} does not hold the model that its configuration describes:\n  " + "\n  ".join(problems))
