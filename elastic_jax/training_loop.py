"""The loop around the training step: batches, metrics, checkpoints, resuming, stopping."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.data.batch import PackedBatch
from elastic_jax.data.tasks import TaskClass
from elastic_jax.elastic import Arrays, ElasticModel
from elastic_jax.files import append_lines, read_lines, replacing
from elastic_jax.processes import in_any, in_first, is_first
from elastic_jax.trainer import TrainConfig, TrainState, init_state, make_train_step, replicate, shard_batch

_METRICS = "metrics.jsonl"


class NonFiniteLossError(RuntimeError):
    """The loss of a step was infinite or NaN; the checkpoints hold the steps before it."""


class BatchSource(Protocol):
    """What training needs of data: any step's packs, without reading the steps before it."""

    def batch(self, step: int, shape: tuple[int, int]) -> PackedBatch:
        """Returns the step's packs as numpy arrays [A, B, ...]."""
        ...


@contextlib.contextmanager
def _stop_flag() -> Iterator[list[int]]:
    """Yields a list that is empty until SIGTERM or Ctrl-C arrives; a second Ctrl-C interrupts as usual."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        del frame
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class MetricsLog:
    """One JSON line per step in `metrics.jsonl`, and the same numbers for TensorBoard.

    Lines of steps from `first_step` on are dropped when opened: a resumed run writes them again.
    """

    def __init__(self, directory: Path, first_step: int):
        from tensorboardX import SummaryWriter

        self._file = directory / _METRICS
        kept = [line for line in read_metrics(directory) if line["step"] < first_step] if self._file.exists() else []
        with replacing(self._file) as partial:
            append_lines(partial, *kept)
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def write(self, step: int, record: dict[str, Any]) -> None:
        append_lines(self._file, {"step": step, **record})
        for name, value in record.items():
            for suffix, number in value.items() if isinstance(value, dict) else [("", value)]:
                if number is not None:
                    self._board.add_scalar(f"{name}/{suffix}".rstrip("/"), number, step)

    def close(self) -> None:
        self._board.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's `metrics.jsonl`; the last one may have been cut by a kill and is then left out.

    Raises:
      ValueError: another line is damaged, named by its number.
    """
    records = []
    for where, record in read_lines(directory / _METRICS, b'{"step": '):
        if not isinstance(record.get("step"), int):
            raise ValueError(f"{where} is damaged: a whole number as step is needed")
        records.append(record)
    return records


def _record(metrics: dict[str, np.ndarray], config: TrainConfig) -> dict[str, Any]:
    """Plain numbers: class metrics by class name, None for a class without documents, and the targets beside them."""
    finite = lambda x: float(x) if math.isfinite(float(x)) else None
    by_class = lambda values: {task.name.lower(): finite(values[task]) for task in TaskClass}
    record = {name: by_class(value) if value.ndim else float(value) for name, value in metrics.items()}
    record["target_low"], record["target_high"] = by_class(config.penalty.lower), by_class(config.penalty.upper)
    return record


def train(
    model: ElasticModel,
    backbone: Arrays,
    data: BatchSource,
    config: TrainConfig,
    run: RunDirectory,
    mesh: Mesh,
    *,
    tokens_per_pack: int,
    checkpoint_every: int,
) -> tuple[TrainState, bool]:
    """Trains to `config.optimizer.steps`, going on from the run's newest checkpoint where it has one.

    A resumed run is bit-identical to an uninterrupted one on the same devices. SIGTERM and Ctrl-C, in any of the processes, end the run
    after the current step with a checkpoint. The first process writes the metrics.

    Returns:
      the last state, and whether training is complete (False after a signal).

    Raises:
      NonFiniteLossError: names the step and its packs; nothing of that step is saved.
    """
    shape = config.micro_batches(mesh.size)
    state = replicate(init_state(model, config), mesh)
    if run.latest_step is not None:
        state = run.load(state, mesh)
    train_step = make_train_step(model, config, mesh)
    steps, first = config.optimizer.steps, int(state.step)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_stop_flag())
        log = in_first(lambda: stack.enter_context(contextlib.closing(MetricsLog(run.path, first))))
        bar = stack.enter_context(tqdm(total=steps, initial=first, unit="step", disable=not is_first()))
        batches = (shard_batch(data.batch(step, shape), mesh) for step in range(first, steps))
        batch = next(batches, None)
        for step in range(first, steps):
            started = time.perf_counter()
            assert batch is not None
            state, device_metrics = train_step(state, backbone, batch)
            batch = next(batches, None)  # while the device works
            metrics = jax.device_get(device_metrics)
            watched = {name: float(metrics[name]) for name in ("loss", "grad_norm", "update_norm")}
            if not all(map(math.isfinite, watched.values())):
                packs, saved = config.global_batch, run.latest_step
                raise NonFiniteLossError(
                    f"step {step}: {', '.join(f'{name} {value}' for name, value in watched.items())} in packs {step * packs} to "
                    f"{(step + 1) * packs - 1}; {'no checkpoint yet' if saved is None else f'the newest checkpoint is of step {saved}'}"
                )
            record = _record(metrics, config)
            record["tokens_per_second"] = config.global_batch * tokens_per_pack / (time.perf_counter() - started)
            if log is not None:
                log.write(step, record)
            documents = metrics["documents"]
            msr = float(np.nansum(np.where(documents > 0, metrics["msr"], 0.0) * documents) / max(documents.sum(), 1))
            bar.set_postfix_str(f"loss {record['loss']:.3f}, MSR {msr:.2f}, {record['tokens_per_second']:.0f} tokens/s")
            bar.update()
            stop = in_any(bool(stopped))
            if step + 1 == steps or (step + 1) % checkpoint_every == 0 or stop:
                run.save(state)
            if stop:
                break
    return state, int(state.step) == steps
