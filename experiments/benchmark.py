"""Benchmarks: one JSON line per case on standard output, with versions and device; with --out also files: lines, a table and a plot.

python -m experiments.benchmark --what=attention --tokens=16384 --sparse_shares=0,0.875 --implementations=mosaic,triton,cudnn_jax
python -m experiments.benchmark --what=train_step --tokens=1024
python -m experiments.benchmark --what=prefill --model=qwen3_4b --tokens=131072 --sparse_shares=0,0.7
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from elastic_jax.config import RouterConfig, SparsityConfig
from elastic_jax.data.packing import check_pack_shape
from experiments import common
from experiments.bench import attention, inference, report, router, train_step, tuning, xattn
from experiments.bench.shapes import SHAPES
from experiments.common import define_model_flags, errors_in_one_line, load_elastic_model, model_settings

_WHATS = ["attention", "dispatch", "backward", "xattn", "router", "train_step", *inference.DEFAULTS, "report"]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"unexpected argument {argv[1]!r}: every option is a flag, --help lists them")
    values = flags.FLAGS
    logging.set_verbosity(logging.WARNING)
    if values.what != "memory":
        # JAX would take most of the GPU's memory at its first use and leave PyTorch none. Read when the device is opened, which is later.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with errors_in_one_line():
        _refuse_empty_lists()
        folder = Path(values.out) if values.out else None
        if values.what == "report":
            if folder is None or not (files := sorted(folder.glob("*.jsonl"))):
                raise ValueError(f"--out={values.out}: --what=report needs a folder with the .jsonl files of earlier runs")
        else:
            files = [folder / f"{values.what}.jsonl"] if folder is not None else []
            report.write(_records(values.what), files[0] if files else None)
        for file in files:
            if not file.stat().st_size:
                print(f"{file} is empty", file=sys.stderr)
            for path in filter(None, (report.table(file), report.plot(file))):
                print(f"wrote {path}", file=sys.stderr)


def _records(what: str) -> Iterator[dict[str, Any]]:
    values, settings = flags.FLAGS, model_settings()
    if what in inference.DEFAULTS:
        implementations, tokens, shares = inference.DEFAULTS[what]
        yield from inference.run(
            what,
            settings=settings,
            tokens=_numbers("tokens", int, tokens),
            batches=_numbers("batches", int, (1,)),
            sparse_shares=_numbers("sparse_shares", float, shares),
            routed=values.routed,
            implementations=values.implementations or implementations,
            samples=values.samples,
            memory_layers=values.memory_layers,
        )
        return
    common = {"dtype": settings["dtype"], "samples": values.samples}
    if what == "train_step":
        for tokens in _numbers("tokens", int, (1024,)):
            check_pack_shape(tokens, values.block_size, 1)
            model, backbone, _ = load_elastic_model(settings)
            yield from train_step.run(model, backbone, tokens=tokens, samples=values.samples)
        return
    common["shape"] = values.shape
    if what == "router":
        config = RouterConfig(width=settings["router_width"], pooling=settings["pooling"])
        yield from router.run(tokens=_numbers("tokens", int, router.TOKENS), config=config, **common)
        return
    common["sparsity"] = SparsityConfig(
        **{name: settings[name] for name in ("block_size", "sink_tokens", "local_tokens", "xattn_stride", "xattn_threshold")}
    )
    if what == "xattn":
        yield from xattn.run(
            tokens=_numbers("tokens", int, xattn.TOKENS),
            inputs=values.xattn_inputs,
            implementations=values.implementations or xattn.IMPLEMENTATIONS,
            **common,
        )
        return
    implementations, tokens, shares = attention.DEFAULTS[what]
    yield from attention.run(
        what,
        tokens=_numbers("tokens", int, tokens),
        sparse_shares=_numbers("sparse_shares", float, shares),
        implementations=values.implementations or implementations,
        flex_options={} if values.flex_options is None else _options(values.flex_options),
        gradient_check_tokens=values.gradient_check_tokens,
        **common,
    )


def _refuse_empty_lists() -> None:
    for flag in ("tokens", "batches", "sparse_shares", "implementations", "xattn_inputs"):
        if flags.FLAGS[flag].value == []:
            raise ValueError(f"--{flag}= is empty: leave it out for all, or give values with commas between them")


def _numbers(flag: str, kind: type, default: Any) -> Any:
    texts: list[str] | None = flags.FLAGS[flag].value
    if texts is None:
        return default
    try:
        numbers = [kind(text) for text in texts]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < (1 if kind is int else 0):
        accepted = "whole numbers from 1" if kind is int else "numbers from 0"
        raise ValueError(f"--{flag}={','.join(texts)}: accepted are {accepted}, with commas between them")
    return numbers


def _options(text: str) -> dict[str, dict[str, Any]]:
    """By kind: {"mixed": {...}, "window": {...}}, or one of them, as they are; a plain object is for both."""
    try:
        options = json.loads(text)
    except json.JSONDecodeError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"--flex_options={text}: accepted is a JSON object")
    if options and set(options) <= set(tuning.KINDS) and all(isinstance(x, dict) for x in options.values()):
        return options
    return {kind: options for kind in tuning.KINDS}


if __name__ == "__main__":
    define_model_flags()
    flags.adopt_module_key_flags(common)  # so that --help has them
    flags.DEFINE_enum("what", None, _WHATS, "What to time; `report` writes table and plot of the files of --out again.", required=True)
    flags.DEFINE_enum("shape", "qwen3_4b", list(SHAPES), "Model whose heads the kernels get; those that run a whole model take --model.")
    flags.DEFINE_list("tokens", None, "Sequence lengths (default: of each benchmark its own).")
    flags.DEFINE_list(
        "batches", None, "Numbers of prompts at once, each with sparse heads of its own: prefill, decode, memory (default: 1)."
    )
    flags.DEFINE_list("sparse_shares", None, "Shares of sparse KV heads: attention, dispatch, backward, prefill, decode, memory.")
    flags.DEFINE_bool("routed", False, "Adds a case whose heads random routers choose: prefill, memory.")
    flags.DEFINE_integer(
        "memory_layers",
        None,
        "memory: run the prompt through so many layers only (default: all). Weights and cache are of all, and layers need the same memory.",
        lower_bound=1,
    )
    flags.DEFINE_list("implementations", None, "Which to time, by name: attention, dispatch, backward, xattn, prefill, decode.")
    flags.DEFINE_list("xattn_inputs", list(xattn.INPUTS), "Queries and keys of xattn: random, demo (a layer of the demo model).")
    flags.DEFINE_string(
        "flex_options",
        None,
        'FlexAttention\'s kernel_options as JSON: one object for all, or {"mixed": {...}, "window": {...}} for flex_torch and for serial '
        "dispatch's window kernel (default, and where one is absent: the best of a few, tried at 16K tokens).",
    )
    flags.DEFINE_integer(
        "gradient_check_tokens",
        attention.GRADIENT_CHECK_TOKENS,
        "Length at which backward checks the gradients of cases that are longer; 0: no check.",
        lower_bound=0,
    )
    flags.DEFINE_integer("samples", 5, "Timed samples of each case.", lower_bound=1)
    flags.DEFINE_string("out", None, "Folder that gets the lines too (appended to WHAT.jsonl) a table (WHAT.md) and a plot (WHAT.png).")
    app.run(main)
