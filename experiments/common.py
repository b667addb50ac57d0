"""Flags and loading that the programs share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from absl import flags

from elastic_jax import assets, pretrained
from elastic_jax.checkpoints import RunDirectory, load_router, run_configs
from elastic_jax.config import RouterConfig, SparsityConfig
from elastic_jax.data.documents import Documents
from elastic_jax.data.hub_sources import Split
from elastic_jax.data.sources import load_documents, needs_tokenizer
from elastic_jax.elastic import Arrays, ElasticModel, split_layers
from elastic_jax.generate import Generator
from elastic_jax.models.config import PRESETS
from elastic_jax.training_loop import NonFiniteLossError
from elastic_jax.weights.load import load_stop_tokens, load_tokenizer

# transformers is here for its tokenizers: that PyTorch is absent is no news.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# The one preset whose weights `python -m experiments.fetch_assets` brings.
_PACKAGED = ("smollm2_135m",)

_SPARSITY = SparsityConfig()
_ROUTER = RouterConfig()


def define_model_flags() -> None:
    """Flags that name the model and how its heads are made sparse; every default is the paper's."""
    flags.DEFINE_string("model", "smollm2_135m", f"Preset ({', '.join(PRESETS)}), or a folder, .gguf file or hub id with weights.")
    flags.DEFINE_string("weights", None, "Folder, .gguf file or hub id with the preset's weights.")
    flags.DEFINE_float("yarn_factor", None, "Stretch the model's positions by this factor with YaRN (the paper's Qwen3 runs: 8).")
    flags.DEFINE_enum("dtype", None, ["bfloat16", "float32"], "Of weights and activations (default: bfloat16 on a GPU, else float32).")
    flags.DEFINE_enum("setting", _SPARSITY.setting, ["fa_ssa", "fa_xa", "xa_ssa"], "Retrieval mode and sparse mode.")
    flags.DEFINE_integer("block_size", _SPARSITY.block_size, "Tokens per block.")
    flags.DEFINE_integer("sink_tokens", _SPARSITY.sink_tokens, "First tokens that a streaming head sees.")
    flags.DEFINE_integer("local_tokens", _SPARSITY.local_tokens, "Last tokens that a streaming head sees.")
    flags.DEFINE_integer("xattn_stride", _SPARSITY.xattn_stride, "XAttention's stride.")
    flags.DEFINE_float("xattn_threshold", _SPARSITY.xattn_threshold, "Share of attention mass that XAttention keeps.")
    flags.DEFINE_enum("pooling", _ROUTER.pooling, ["boundary", "user_turn", "sequence"], "Keys that the router averages.")
    flags.DEFINE_integer("router_width", _ROUTER.width, "Hidden width of the router's MLPs, in head dimensions.")
    flags.DEFINE_enum("implementation", None, ["xla", "reference"], "Of the attention (default: the best for the device).")


MODEL_FLAGS = (
    "yarn_factor",
    "model",
    "weights",
    "dtype",
    "setting",
    "block_size",
    "sink_tokens",
    "local_tokens",
    "xattn_stride",
    "xattn_threshold",
    "pooling",
    "router_width",
    "implementation",
)


def model_settings() -> dict[str, Any]:
    """The values of `MODEL_FLAGS`, the dtype filled in."""
    settings = {name: flags.FLAGS[name].value for name in MODEL_FLAGS}
    settings["dtype"] = settings["dtype"] or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    return settings


def weights_source(model: str, weights: str | None) -> str:
    """Where the weights of `--model` and `--weights` are; ValueError says in one line what to give."""
    if weights:
        return weights
    if model in _PACKAGED:
        return str(assets.require(model))
    if model in PRESETS:
        raise ValueError(
            f"--model={model} is a preset without weights: add --weights=FOLDER with its config.json and safetensors, "
            "a .gguf file, or its hub id"
        )
    return model


def load_elastic_model(settings: dict[str, Any]) -> tuple[ElasticModel, Arrays, str]:
    """The model that a run's settings name: (static model, backbone arrays, source of the weights and tokenizer)."""
    source = weights_source(settings["model"], settings["weights"])
    sparsity, router = run_configs(settings)
    options = {name: settings[name] for name in ("dtype", "implementation", "yarn_factor")}
    model, backbone = pretrained.load_elastic_model(source, sparsity=sparsity, router=router, **options)
    preset, found = PRESETS.get(settings["model"]), model.config
    if preset is not None and (preset.num_layers, preset.hidden_size) != (found.num_layers, found.hidden_size):
        raise ValueError(
            f"--weights={source} has {found.num_layers} layers of width {found.hidden_size}, but "
            f"--model={settings['model']} has {preset.num_layers} of {preset.hidden_size}"
        )
    return model, backbone, source


def load_generator(router: str | None, cache_gib: float | None) -> tuple[Generator, dict[str, Any], str]:
    """The generator that the model flags and a training run name, the settings that its answers depend on, and where the weights are.

    What a flag does not say is as in the run, but how it is computed; a model that is named has weights of its own.
    """
    settings, values = model_settings(), flags.FLAGS
    with contextlib.ExitStack() as stack:
        run = None if router is None else stack.enter_context(RunDirectory(router))
        if run is not None:
            trained = run.settings()
            own = {"dtype", "implementation", *(["weights"] if values["model"].present else [])}
            inherited = [name for name in MODEL_FLAGS if name not in own and not values[name].present]
            if missing := [name for name in inherited if name not in trained]:
                raise ValueError(f"{run.path / 'settings.json'} is damaged: {missing[0]} is missing")
            settings |= {name: trained[name] for name in inherited}
        model, backbone, source = load_elastic_model(settings)
        routers = None if run is None else load_router(run, model)
        settings |= {"router": None if run is None else [str(run.path), run.latest_step]}
    backbones, tokenizer, stop_tokens = split_layers(backbone, free=True), load_tokenizer(source), load_stop_tokens(source)
    return Generator(model, backbones, routers, tokenizer, stop_tokens=stop_tokens, cache_gib=cache_gib), settings, source


def read_heads(heads: str | None) -> Any:
    """A plan from a file, [L, K]; "full", "sparse" and None stay what they are."""
    if heads in (None, "full", "sparse"):
        return heads
    accepted = "accepted are full, sparse, and a .npy or .json file of 0 and 1 [layers][KV heads]"
    file = Path(heads)
    try:
        if file.suffix == ".npy":
            plan = np.load(file)
        elif file.suffix == ".json":
            plan = np.array(json.loads(file.read_text(encoding="utf-8")))
        else:
            raise ValueError("neither of these")
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ValueError(f"--heads={heads}: {accepted} ({error})") from error
    if not isinstance(plan, np.ndarray):
        raise ValueError(f"--heads={heads}: {accepted}, not an archive of arrays")
    if plan.ndim != 2 or plan.dtype.kind not in "biuf":
        raise ValueError(f"--heads={heads}: {accepted}, not an array of shape {plan.shape} and type {plan.dtype}")
    return plan


def check_length(model: ElasticModel, max_tokens: int) -> None:
    """ValueError where documents are longer than the model's positions; says what factor would do."""
    limit = model.config.max_positions
    if max_tokens > limit:
        raise ValueError(
            f"--max_tokens={max_tokens} is beyond the model's {limit} positions: give at most {limit}, or "
            f"--yarn_factor={model.config.yarn_factor_for(max_tokens)} to stretch them"
        )


def longest_document(settings: dict[str, Any]) -> int:
    """Tokens of the longest document that a run's settings allow."""
    return settings["pack_tokens"] if settings["max_tokens"] is None else settings["max_tokens"]


def load_run_documents(
    settings: dict[str, Any], source: str, model: ElasticModel, *, split: Split, rows: int, workers: int = 1
) -> Documents:
    """The documents that a run's settings name, tokenised with the tokenizer beside the weights; `rows` per class in the corpus."""
    max_tokens = longest_document(settings)
    documents = load_documents(
        settings["data"],
        load_tokenizer(source) if needs_tokenizer(settings["data"]) else None,
        split=split,
        max_tokens=max_tokens,
        min_tokens=min(settings["min_tokens"], max_tokens),
        corpus_rows_per_class=rows,
        seed=settings["seed"],
        workers=workers,
    )
    documents.check_vocabulary(model.config.vocab_size)
    return documents


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the program with one line and exit status 1 for what the user can mend, and quietly for Ctrl-C."""
    try:
        yield
    except (ValueError, OSError, ImportError, NotImplementedError, OverflowError, MemoryError, NonFiniteLossError) as error:
        sys.exit(f"error: {error or type(error).__name__}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sys.exit(f"error: the device is out of memory ({str(error).splitlines()[0]}): shorter or fewer sequences at once need less")
    except KeyboardInterrupt:
        end_interrupted("interrupted")


def end_interrupted(message: str) -> NoReturn:
    """Ends the program as one that SIGINT ends; at once, since threads that compute would make an ordinary exit crash."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX_COMPILATION_CACHE_DIR names another place."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "elastic_jax" / "jax"
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default)))
