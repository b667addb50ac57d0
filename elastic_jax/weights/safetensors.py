"""Hugging Face folders: config.json with model.safetensors, whole or in shards. Read and written without torch."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from elastic_jax.checks import read_json
from elastic_jax.models.config import ModelConfig
from elastic_jax.models.decoder import Decoder
from elastic_jax.weights.names import assemble, placements

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_ROTARY_BUFFERS = r".*\.rotary_emb\.inv_freq"  # old checkpoints carry them; they follow from the configuration


def load_safetensors(folder: str | Path, *, dtype: jax.typing.DTypeLike) -> Decoder:
    """Loads a Hugging Face model folder.

    Args:
      folder: holds config.json and model.safetensors, or its shards with model.safetensors.index.json.
      dtype: of the decoder's parameters; the files' own may differ.

    Raises:
      FileNotFoundError: the folder lacks one of these files.
      ValueError: the configuration is not supported, a file is damaged, or the tensors are not those of the model.
    """
    folder = Path(folder)
    config = ModelConfig.from_hf(folder)
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    problems = []
    for path in _weight_files(folder):
        opened = _open(path)
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in files:
                raise ValueError(f"{path}: tensor {name} is in another shard too")
            view = opened.get_slice(name)
            if view.get_dtype() not in _FLOATS:
                problems.append(f"{path}: tensor {name} has dtype {view.get_dtype()}: accepted are {', '.join(_FLOATS)}")
            files[name], shapes[name] = opened, tuple(view.get_shape())
    if problems:
        raise ValueError("\n".join(problems))
    ignored = [_ROTARY_BUFFERS] + (["lm_head.weight"] if config.tie_embeddings else [])

    def read(name: str) -> np.ndarray:
        return files[name].get_tensor(name)

    return assemble(config, naming="hf", shapes=shapes, read=read, dtype=dtype, source=str(folder), ignored=ignored)


def save_safetensors(decoder: Decoder, folder: str | Path) -> None:
    """Writes config.json and model.safetensors, which transformers and `load_safetensors` read. The folder may exist.

    Raises:
      ValueError: the configuration is one that no Hugging Face model type describes.
    """
    config = decoder.config
    description = config.to_hf()
    flat = dict(nnx.to_flat_state(nnx.state(decoder)))
    tensors: dict[str, np.ndarray] = {}
    for placement in placements(config, flat, "hf"):
        stacked = np.asarray(flat[placement.path][...]).reshape(len(placement.tensors), *placement.shape)
        tensors |= dict(zip(placement.tensors, stacked, strict=True))
    description["dtype"] = str(tensors["model.norm.weight"].dtype)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})  # transformers refuses files without this mark
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.exists():
        raise FileNotFoundError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}")
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
        raise ValueError(f"{index}: weight_map={reprlib.repr(found)}: an object with the file of every tensor is needed")
    shards = sorted(set(found.values()))
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ValueError(f"{index} names shards that are not in the folder: {', '.join(absent)}")
    return [folder / shard for shard in shards]


def _open(path: Path) -> Any:
    """A lazily read file (the library's own object, which has no public type)."""
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) is truncated or not a safetensors file: {error}") from error
