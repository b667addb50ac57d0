"""Evaluates a trained run, or any model on a benchmark.

`--suite=heldout` compares a run's router with full, all-sparse and random routing on held-out documents; the others run a benchmark.
All GPUs of the machine share the batches.

python -m experiments.evaluate --suite=heldout --out=runs/smollm2
python -m experiments.evaluate --suite=ruler --preset=smoke --router=runs/smollm2 --out=runs/ruler
python -m experiments.evaluate --suite=ruler --preset=smoke --heads=full --out=runs/ruler_full
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import jax
from absl import app, flags, logging

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.data.packing import fill_pack
from elastic_jax.evaluation.heldout import HeldoutScorer, evaluate_heldout, heldout_batches, report_table
from elastic_jax.files import replacing
from elastic_jax.trainer import data_mesh, init_state
from experiments import common, suites
from experiments.common import (
    MODEL_FLAGS,
    define_model_flags,
    errors_in_one_line,
    load_elastic_model,
    load_run_documents,
    use_compilation_cache,
)
from experiments.figures import plot_heads
from experiments.suites import SUITES, check_suite_flags, define_suite_flags, run_suite
from experiments.train import train_config


def _heldout(out: str, rows: int, random_seeds: int, batch_size: int, seed: int, logit_bias: float) -> None:
    with RunDirectory(out) as run:
        settings = run.settings()
        if run.latest_step is None:
            raise ValueError(f"--out={out} holds no checkpoint yet")
        model, backbone, source = load_elastic_model(settings)
        state = run.load(init_state(model, train_config(settings)), data_mesh(jax.devices()[:1]))
    documents = load_run_documents(settings, source, model, split="heldout", rows=rows)
    print(documents.report)
    chosen = _first_of_each_class(documents, rows)
    block = settings["block_size"]
    tokens = max(-(-len(document.tokens) // block) * block for document in chosen)
    packs = [fill_pack([d], pack_tokens=tokens, block_size=block, max_documents=1, loss_on="answer") for d in chosen]
    batches = heldout_batches(packs, [document.kind for document in chosen], batch_size)
    started = time.perf_counter()
    scorer = HeldoutScorer(model, backbone, state.trainable["router"], batches, devices=jax.local_devices())
    report: dict[str, Any] = evaluate_heldout(scorer, random_seeds=random_seeds, seed=seed, logit_bias=logit_bias)
    device = jax.devices()[0].device_kind
    report |= {"logit_bias": logit_bias, "step": int(state.step), "settings": settings, "device": device, "jax": jax.__version__}
    path = run.path / "heldout.json"
    with replacing(path) as file:
        file.write_text(json.dumps(report, indent=2) + "\n")
    table = (
        f"Held-out documents, router of step {int(state.step)}; answer loss in nats per token; {random_seeds} draws of random "
        f"routing at the router's sparsity; {device}, jax {jax.__version__}\n\n{report_table(report)}\n"
    )
    with replacing(run.path / "heldout.md") as file:
        file.write_text(table, encoding="utf-8")
    print(f"\n{table}\n{time.perf_counter() - started:.0f} s; wrote {path}, heldout.md and {plot_heads(run.path, report).name}")


def _first_of_each_class(documents: Any, rows: int) -> list[Any]:
    taken: dict[Any, int] = {}
    chosen = []
    for document in documents:
        taken[document.task] = taken.get(document.task, 0) + 1
        if taken[document.task] <= rows:
            chosen.append(document)
    if not chosen:
        raise ValueError(f"no held-out document is left\n{documents.report}")
    return chosen


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"unexpected argument {argv[1]!r}: every option is a flag, --help lists them")
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of a save
    use_compilation_cache()
    values = flags.FLAGS
    with errors_in_one_line():
        if values.out == "":
            raise ValueError("--out is empty: give a folder, or leave the flag out")
        if not math.isfinite(values.logit_bias):
            raise ValueError(f"--logit_bias={values.logit_bias}: a finite number is needed; --heads=full or sparse makes all heads alike")
        if values.suite == "heldout":
            if given := [name for name in MODEL_FLAGS if values[name].present]:
                raise ValueError(f"--{given[0]}: held-out documents are scored with the model of the run in --out")
            check_suite_flags("heldout")
            out, batch_size = values.out or "runs/train", values.batch_size or 1
            _heldout(out, values.rows, values.random_seeds, batch_size, values.seed, values.logit_bias)
        else:
            out, batch_size = values.out or f"runs/{values.suite}", values.batch_size or 8
            run_suite(values.suite, out, batch_size=batch_size, seed=values.seed, logit_bias=values.logit_bias)


if __name__ == "__main__":
    flags.DEFINE_enum("suite", "heldout", ["heldout", *SUITES], "What to evaluate.")
    flags.DEFINE_string("out", None, "Held-out: the run's folder (default: runs/train); else where the results go (runs/SUITE).")
    flags.DEFINE_integer("rows", 40, "Held-out: documents of each class.", lower_bound=1)
    flags.DEFINE_integer("random_seeds", 5, "Held-out: draws of random routing.", lower_bound=1)
    flags.DEFINE_integer("batch_size", None, "Documents or prompts per forward pass (default: 1 held-out, else 8).", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of random routing, or of answers that are drawn.", lower_bound=0)
    flags.DEFINE_float("logit_bias", 0.0, "Added to every head's logit for full attention: moves the sparsity without retraining.")
    define_model_flags()
    define_suite_flags()
    for module in (common, suites):  # so that --help has them
        flags.adopt_module_key_flags(module)
    app.run(main)
