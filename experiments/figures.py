"""Plots of a run: the four panels of the paper's Fig. 13, and the head-by-layer heatmaps of its Fig. 6; of a benchmark: its Fig. 8.

python -m experiments.figures --out=runs/demo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from elastic_jax.data.tasks import TaskClass
from elastic_jax.files import replacing
from elastic_jax.training_loop import read_metrics
from experiments.common import errors_in_one_line

_CLASSES = [task.name.lower() for task in TaskClass]


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def _save(figure: Any, path: Path) -> Path:
    with replacing(path) as file:
        figure.savefig(file, dpi=110, format="png")
    return path


def _smooth(values: np.ndarray, weight: float = 0.9) -> np.ndarray:
    """Exponential moving average with bias correction; NaN entries are passed over."""
    smoothed, total, norm = np.full(len(values), np.nan), 0.0, 0.0
    for index, value in enumerate(values):
        if np.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed[index] = total / norm if norm else np.nan
    return smoothed


def plot_training(run: Path) -> Path:
    """Writes `training.png`: language loss, penalty, sparsity by class, lambda1 by class, each against the step (Fig. 13)."""
    records = read_metrics(run)
    if not records:
        raise ValueError(f"{run / 'metrics.jsonl'} has no steps to plot")
    step = np.array([record["step"] for record in records])
    series = lambda name: np.array([record[name] for record in records], float)
    by_class = lambda name, task: np.array([np.nan if r[name][task] is None else r[name][task] for r in records], float)
    figure, axes = _axes(2, 2, (11, 7))
    for axis, name, title in ((axes[0, 0], "lm_loss", "language loss (nats/token)"), (axes[0, 1], "penalty", "sparsity penalty")):
        axis.plot(step, series(name), alpha=0.3)
        axis.plot(step, _smooth(series(name)), color="C0")
        axis.set(title=title, xlabel="step")
    for axis, name, title in ((axes[1, 0], "msr", "sparsity Ω_MSR, smoothed"), (axes[1, 1], "lambda1", "multiplier λ1")):
        for task in _CLASSES:
            values = by_class(name, task)
            axis.plot(step, _smooth(values) if name == "msr" else values, label=task)
        axis.set(title=title, xlabel="step")
    axes[1, 0].set_ylim(0, 1)
    axes[1, 0].legend(fontsize=8)
    return _save(figure, run / "training.png")


def plot_heads(run: Path, report: dict[str, Any]) -> Path:
    """Writes `heads.png`: how often each head is full, layers by KV heads, for all documents and for each class (Fig. 6)."""
    names = list(report["heads"])
    figure, axes = _axes(1, len(names), (1.2 + 1.5 * len(names), 6))
    image = None
    for axis, name in zip(axes[0], names, strict=True):
        frequency = np.array(report["heads"][name])
        image = axis.imshow(frequency, vmin=0, vmax=1, aspect="auto", cmap="viridis", origin="lower")
        axis.set(title=name, xlabel="KV head", xticks=range(frequency.shape[1]))
    axes[0, 0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="share of documents with full attention")
    return _save(figure, run / "heads.png")


def plot_lengths(out: Path, report: dict[str, Any]) -> Path:
    """Writes `lengths.png` from `suite_report`: performance, speed-up where there is one, and sparsity against the length (Fig. 8)."""
    cells, speedup = report["cells"]["lengths"], report.get("speedup", {"lengths": {}})["lengths"]
    names = list(cells)
    series = lambda name: np.array([cells[length][name] for length in names], float)
    figure, axes = _axes(1, 3 if speedup else 2, (11 if speedup else 8, 3.5))
    performance, sparsity = axes[0, 0], axes[0, -1]
    mean = series("mean")
    performance.errorbar(names, mean, np.abs(np.stack([series("low"), series("high")]) - mean), marker="o", capsize=3)
    performance.set(title="performance, 95 % intervals", ylabel="%")
    if speedup:
        axes[0, 1].plot(names, [speedup.get(length, {}).get("speedup", np.nan) for length in names], marker="o")
        axes[0, 1].axhline(1, color="gray", linewidth=0.8)
        axes[0, 1].set(title="speed-up of prefill")
    for name, label in (("msr", "Ω_MSR"), ("esr", "Ω_ESR")):
        sparsity.plot(names, series(name), marker="o", label=label)
    sparsity.set(title="sparsity", ylim=(-0.02, 1.02))
    sparsity.legend(fontsize=8)
    for axis in axes[0]:
        axis.set_xlabel("length")
    return _save(figure, out / "lengths.png")


def main(argv: list[str]) -> None:
    del argv
    run = Path(flags.FLAGS.out)
    if not (run / "metrics.jsonl").exists():
        sys.exit(f"--out={run} holds no finished or running training: metrics.jsonl is missing")
    with errors_in_one_line():
        print(f"wrote {plot_training(run)}")
        report = run / "heldout.json"
        if report.exists():
            print(f"wrote {plot_heads(run, json.loads(report.read_text()))}")


if __name__ == "__main__":
    flags.DEFINE_string("out", "runs/train", "The run's folder.")
    app.run(main)
