"""A generator from where a model's weights are and, if wanted, from a training run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp

from elastic_jax.checkpoints import RunDirectory, load_router, run_configs
from elastic_jax.config import RouterConfig, SparsityConfig
from elastic_jax.elastic import Arrays, ElasticModel, split_layers
from elastic_jax.generate import Generator
from elastic_jax.weights.load import load_model, load_stop_tokens, load_tokenizer
from pallas_kernels.api import Implementation

_DTYPES = ("float32", "bfloat16", "float16")


def load_elastic_model(
    source: str | Path,
    *,
    sparsity: SparsityConfig,
    router: RouterConfig,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation | None,
    yarn_factor: float | None,
    revision: str | None = None,
) -> tuple[ElasticModel, Arrays]:
    """The static model and its backbone's arrays; arguments and errors as in `load_generator`."""
    decoder = load_model(source, dtype=jnp.dtype(dtype), revision=revision).decoder
    if yarn_factor is not None:
        decoder.config = decoder.config.with_yarn(yarn_factor)
    return ElasticModel.create(decoder, decoder.config, sparsity=sparsity, router=router, implementation=implementation)


def load_generator(
    source: str | Path,
    *,
    router: str | Path | None = None,
    sparsity: SparsityConfig | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
    yarn_factor: float | None = None,
    cache_gib: float | None = None,
    revision: str | None = None,
) -> Generator:
    """Loads a model for generation.

    Args:
      source: a folder with config.json and safetensors, a *.gguf file (or the folder of one), or a hub id.
      router: folder of a training run (`experiments.train`). None: no router, so that only given plans can be run.
      sparsity: what full and sparse mean. None: as in the router's run, else the paper's.
      dtype: of weights, activations and cache. None: bfloat16 on a GPU, else float32.
      implementation: of the attention; None is the best for the device.
      yarn_factor: stretches the model's positions. None: as in the router's run, else not at all.
      cache_gib: as in `Generator`.
      revision: branch, tag or commit of a hub repository.

    Raises:
      FileNotFoundError: nothing usable at `source`.
      ValueError: a damaged file, an unsupported model, a router that is not one of this model, or an argument that is not accepted.
    """
    if not isinstance(source, str | Path):
        raise ValueError(f"source={source!r}: a model folder, a *.gguf file or a hub id is needed")
    if not isinstance(sparsity, SparsityConfig | None):
        raise ValueError(f"sparsity={sparsity!r}: a SparsityConfig or None is needed")
    try:
        known = dtype is None or jnp.dtype(dtype).name in _DTYPES
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"dtype={dtype!r}: accepted are None, {', '.join(_DTYPES)}")
    with contextlib.ExitStack() as stack:
        run = None if router is None else stack.enter_context(RunDirectory(router))
        router_config = RouterConfig()
        if run is not None:
            settings = run.settings()
            trained, router_config = run_configs(settings)
            sparsity = trained if sparsity is None else sparsity
            yarn_factor = settings["yarn_factor"] if yarn_factor is None else yarn_factor
        if dtype is None:
            dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        model, backbone = load_elastic_model(
            source,
            sparsity=SparsityConfig() if sparsity is None else sparsity,
            router=router_config,
            dtype=dtype,
            implementation=implementation,
            yarn_factor=yarn_factor,
            revision=revision,
        )
        routers = None if run is None else load_router(run, model)
    tokenizer, stop_tokens = load_tokenizer(source, revision=revision), load_stop_tokens(source, revision=revision)
    return Generator(model, split_layers(backbone, free=True), routers, tokenizer, stop_tokens=stop_tokens, cache_gib=cache_gib)
