"""Trains the routers of a frozen model; start the same command again to go on after a stop or a kill.

python -m experiments.train --out=runs/smollm2 --pack_tokens=8192 --block_size=64 --sink_tokens=64 --local_tokens=256

All GPUs of the machine share each step's packs; `experiments/launch_node.sh` starts a process per GPU, or several nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

from absl import app, flags, logging

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.data.dataset import PackedDataset
from elastic_jax.data.packing import check_pack_shape
from elastic_jax.data.sources import needs_tokenizer
from elastic_jax.objective import PenaltyConfig
from elastic_jax.optim import OptimizerConfig
from elastic_jax.processes import check_same, in_first, is_first, join_processes, leaving_the_others
from elastic_jax.trainer import TrainConfig, data_mesh, replicate
from elastic_jax.training_loop import train
from experiments import common
from experiments.common import (
    check_length,
    define_model_flags,
    errors_in_one_line,
    load_elastic_model,
    load_run_documents,
    longest_document,
    model_settings,
    use_compilation_cache,
)
from experiments.figures import plot_training

_TRAIN = TrainConfig()
_OPTIMIZER = OptimizerConfig()

# Where a run writes and how fast it goes; every other flag is part of what the run is.
_FREE_FLAGS = ("out", "packs_per_device", "checkpoint_every", "keep", "workers")


def define_training_flags() -> tuple[str, ...]:
    """Defines the flags of data, objective and optimiser, and returns their names; every default is the paper's."""
    before = set(flags.FLAGS)
    flags.DEFINE_string("data", "corpus", "Sources joined by commas; an unknown one makes the program list them.")
    flags.DEFINE_integer("pack_tokens", 65_536, "Tokens per pack.")
    flags.DEFINE_integer("min_tokens", 1_000, "Shortest document.")
    flags.DEFINE_integer("max_tokens", None, "Longest document (default: pack_tokens).")
    flags.DEFINE_integer("max_documents", 16, "Most documents per pack.")
    flags.DEFINE_integer("corpus_rows", 400, "Documents of each class in the offline corpus.")
    flags.DEFINE_enum("loss_on", "all", ["all", "answer"], "Tokens whose prediction counts in the language loss.")
    flags.DEFINE_integer("workers", 2, "Threads that tokenise.")
    flags.DEFINE_integer("steps", _OPTIMIZER.steps, "Optimiser steps.")
    flags.DEFINE_integer("global_batch", _TRAIN.global_batch, "Packs per optimiser step, over all devices.")
    flags.DEFINE_float("router_lr", _OPTIMIZER.router_lr, "Peak learning rate of the routers.")
    flags.DEFINE_float("multiplier_lr", _OPTIMIZER.multiplier_lr, "Peak learning rate of the multipliers.")
    flags.DEFINE_float("warmup", _OPTIMIZER.warmup, "Share of the steps that warm up.")
    flags.DEFINE_float("weight_decay", _OPTIMIZER.weight_decay, "Decoupled weight decay of routers and multipliers.")
    flags.DEFINE_float("clip", _OPTIMIZER.clip, "Largest global norm of the mean gradient.")
    flags.DEFINE_float("t_robust", 1.0, "Target sparsity of code, summarisation and in-context learning.")
    flags.DEFINE_float("t_sensitive", 0.7, "Target sparsity of single-hop and multi-hop question answering.")
    flags.DEFINE_list("lower", None, "Lower bound of the sparsity per class, in TaskClass order, instead of the targets.")
    flags.DEFINE_list("upper", None, "Upper bound of the sparsity per class, in TaskClass order, instead of the targets.")
    flags.DEFINE_enum("penalty", "absolute", ["absolute", "signed"], "Linear term: |deviation| (released run) or signed (Eq. 8).")
    flags.DEFINE_enum("temperature", _TRAIN.temperature, ["cosine", "exponential"], "Schedule of the Gumbel-softmax temperature.")
    flags.DEFINE_float("temperature_start", _TRAIN.temperature_start, "Temperature of the first step.")
    flags.DEFINE_float("temperature_end", _TRAIN.temperature_end, "Temperature of the last steps.")
    flags.DEFINE_integer("seed", _TRAIN.seed, "Of routers, multipliers, routing noise, corpus and packing.")
    return tuple(name for name in flags.FLAGS if name not in before and name not in _FREE_FLAGS)


def train_config(settings: dict[str, Any], packs_per_device: int = _TRAIN.packs_per_device) -> TrainConfig:
    """The training configuration that the flags name."""
    if (settings["lower"] is None) != (settings["upper"] is None):
        raise ValueError("--lower and --upper go together: one bound per task class in each")
    if settings["lower"] is None:
        penalty = PenaltyConfig.from_targets(robust=settings["t_robust"], sensitive=settings["t_sensitive"], kind=settings["penalty"])
    else:
        bounds = [tuple(float(bound) for bound in settings[name]) for name in ("lower", "upper")]
        penalty = PenaltyConfig(lower=bounds[0], upper=bounds[1], kind=settings["penalty"])
    names = ("steps", "router_lr", "multiplier_lr", "warmup", "weight_decay", "clip")
    return TrainConfig(
        optimizer=OptimizerConfig(**{name: settings[name] for name in names}),
        penalty=penalty,
        temperature=settings["temperature"],
        temperature_start=settings["temperature_start"],
        temperature_end=settings["temperature_end"],
        global_batch=settings["global_batch"],
        packs_per_device=packs_per_device,
        seed=settings["seed"],
    )


def _run(settings: dict[str, Any], out: str, packs_per_device: int, checkpoint_every: int, keep: int, workers: int) -> None:
    # What can be told at once is told before weights and data are read.
    config, mesh = train_config(settings, packs_per_device), data_mesh()
    config.micro_batches(mesh.size)
    check_pack_shape(settings["pack_tokens"], settings["block_size"], settings["max_documents"])
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every}: at least 1 step is needed")
    for name, value in (("workers", workers), ("max_tokens", settings["max_tokens"]), ("corpus_rows", settings["corpus_rows"])):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")
    needs_tokenizer(settings["data"])
    model, backbone, source = load_elastic_model(settings)
    check_length(model, longest_document(settings))
    with RunDirectory(out, keep=keep) as run:
        started = time.perf_counter()
        documents = load_run_documents(settings, source, model, split="train", rows=settings["corpus_rows"], workers=workers)
        settings |= {"data_sha256": documents.fingerprint}
        same = [settings, packs_per_device, checkpoint_every, run.latest_step]
        check_same("their settings, their data or the newest checkpoint of --out", json.dumps(same, sort_keys=True))
        run.claim(settings)
        print(f"data: {time.perf_counter() - started:.0f} s\n{documents.report}")
        packs = PackedDataset(
            documents,
            pack_tokens=settings["pack_tokens"],
            block_size=settings["block_size"],
            max_documents=settings["max_documents"],
            seed=settings["seed"],
            loss_on=settings["loss_on"],
        )
        counts = ", ".join(f"{task.name.lower()} {count}" for task, count in documents.class_counts.items())
        print(
            f"{len(documents)} documents ({counts}) in {len(packs)} packs of {settings['pack_tokens']} tokens, {packs.fill:.0%} filled; "
            f"{config.optimizer.steps} steps of {config.global_batch} packs on {mesh.size} x {mesh.devices.flat[0].device_kind}"
        )
        if run.latest_step is not None:
            print(f"going on from step {run.latest_step}")
        _, complete = train(
            model,
            replicate(backbone, mesh),
            packs,
            config,
            run,
            mesh,
            tokens_per_pack=settings["pack_tokens"],
            checkpoint_every=checkpoint_every,
        )
        print(f"{'trained' if complete else 'stopped'}: checkpoint of step {run.latest_step} in {run.path}")
        in_first(lambda: print(f"wrote {plot_training(run.path)}"))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"unexpected argument {argv[1]!r}: every option is a flag, --help lists them")
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of a save
    use_compilation_cache()
    values = flags.FLAGS
    # Until training has its own handler there is nothing to save.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    alone = leaving_the_others() if values.distributed else contextlib.nullcontext()
    with alone, errors_in_one_line(), contextlib.ExitStack() as stack:
        if values.distributed:
            join_processes()
            if not is_first():
                silence = stack.enter_context(open(os.devnull, "w"))  # what there is to say, the first process says
                stack.enter_context(contextlib.redirect_stdout(silence))
        settings = model_settings() | {name: values[name].value for name in _TRAINING_FLAGS}
        _run(settings, values.out, values.packs_per_device, values.checkpoint_every, values.keep, values.workers)


if __name__ == "__main__":
    define_model_flags()
    flags.adopt_module_key_flags(common)  # so that --help has them
    _TRAINING_FLAGS = define_training_flags()
    flags.DEFINE_string("out", "runs/train", "Folder of the run: checkpoints, metrics, plots.")
    flags.DEFINE_integer("packs_per_device", _TRAIN.packs_per_device, "Packs that a device holds at a time; the rest is accumulated.")
    flags.DEFINE_integer("checkpoint_every", 100, "Steps between checkpoints.")
    flags.DEFINE_integer("keep", 1, "Checkpoints that stay.")
    flags.DEFINE_boolean("distributed", False, "This is one of several processes that train together (experiments/launch_node.sh).")
    app.run(main)
