"""The programs as a user runs them, in processes of their own, on a tiny model written to a folder."""

import json
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.models.decoder import Decoder
from elastic_jax.trainer import TrainConfig, data_mesh, init_state
from elastic_jax.training_loop import read_metrics
from elastic_jax.weights.safetensors import save_safetensors
from experiments.common import errors_in_one_line
from tests.tiny import tiny_config, tiny_model

STEPS = 6


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with a tiny model and a packed parquet in the released layout."""
    root = tmp_path_factory.mktemp("workshop")
    config = tiny_config()
    save_safetensors(Decoder(config, rngs=nnx.Rngs(params=0), param_dtype=jnp.float32), root / "model")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(12):
        lengths = rng.integers(20, 60, 2)
        ids = rng.integers(0, config.vocab_size, lengths.sum())
        labels = ids.copy()
        labels[[0, lengths[0]]] = -100
        rows.append(
            {
                "input_ids": ids.tolist(),
                "labels": labels.tolist(),
                "seq_lengths": [0, int(lengths[0]), int(lengths.sum())],
                "task_ids": (tasks := rng.integers(0, 5, 2).tolist()),
                "task_type": [["Single QA", "MultiHop QA", "Summarization", "Code", "In-Context Learning"][t] for t in tasks],
                "range_ids": [[0, 0, 0, int(n) - 6, 0, int(n) - 6, int(n) - 5, int(n) - 1] for n in lengths],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), root / "packed.parquet")
    return root


def command(workshop, out, **changes):
    flags = {"model": workshop / "model", "data": f"packed:{workshop}/packed.parquet", "pack_tokens": 128, "min_tokens": 8}
    flags |= {"block_size": 16, "sink_tokens": 16, "local_tokens": 32, "steps": STEPS, "global_batch": 2, "max_documents": 4}
    flags |= {"warmup": 0.0, "router_lr": 0.01, "checkpoint_every": 1, "out": out}
    return [sys.executable, "-m", "experiments.train", *(f"--{k}={v}" for k, v in (flags | changes).items())]


def run(arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, **options)


def final_state(out):
    model, _ = tiny_model()
    with RunDirectory(out) as finished:
        assert finished.latest_step == STEPS
        return finished.load(init_state(model, TrainConfig()), data_mesh(jax.devices()[:1]))


def assert_same_run(one, other):
    jax.tree.map(np.testing.assert_array_equal, final_state(one), final_state(other))
    timeless = lambda path: [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in read_metrics(path)]
    assert timeless(one) == timeless(other)


@pytest.fixture(scope="module")
def whole(workshop):
    """An uninterrupted run."""
    result = run(command(workshop, workshop / "whole"))
    assert result.returncode == 0, result.stderr
    assert f"checkpoint of step {STEPS}" in result.stdout
    return workshop / "whole"


def kill_when(arguments, condition):
    """Starts the program and sends it SIGKILL as soon as the condition holds; returns whether it did before the end."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if condition():
            process.kill()
            process.wait()
            return True
        time.sleep(0.0005)
    return False


def half_written(out):
    return any("tmp" in entry.name for entry in (out / "checkpoints").glob("*"))


def lines(out):
    metrics = out / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def test_a_killed_run_goes_on_bit_identically(workshop, whole):
    """Killed before the first step, after two steps, during a save, and then once more before its end."""
    out = workshop / "killed"
    arguments = command(workshop, out)
    assert kill_when(arguments, lambda: (out / "settings.json").exists())
    assert kill_when(arguments, lambda: lines(out) >= 2)
    before = lines(out)
    assert kill_when(arguments, lambda: lines(out) > before and half_written(out))
    result = run(arguments)
    assert result.returncode == 0, result.stderr
    assert "going on from step" in result.stdout
    assert_same_run(whole, out)


def test_sigterm_and_ctrl_c_save_and_exit_zero(workshop):
    """The run goes on with another number of packs on the device."""
    out = workshop / "stopped"
    reached = 0
    for number, packs in ((signal.SIGTERM, 1), (signal.SIGINT, 2)):
        if reached:  # older runs tell it among their settings
            settings = json.loads((out / "settings.json").read_text())
            (out / "settings.json").write_text(json.dumps(settings | {"packs_per_device": 1}))
        arguments = command(workshop, out, checkpoint_every=10_000, steps=10_000, packs_per_device=packs)
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while lines(out) < reached + 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert (f"going on from step {reached}\n" in stdout) == (reached > 0)
        with RunDirectory(out) as stopped:
            assert (stopped.latest_step or 0) >= reached + 2
            reached = stopped.latest_step
        assert f"stopped: checkpoint of step {reached} in" in stdout
        assert lines(out) == reached


def test_the_run_leaves_metrics_plots_and_settings(whole):
    records = read_metrics(whole)
    assert [record["step"] for record in records] == list(range(STEPS))
    expected = {"lm_loss", "penalty", "msr", "target_low", "target_high", "lambda1", "lambda2", "entropy", "temperature"}
    assert expected | {"router_lr", "multiplier_lr", "grad_norm", "tokens_per_second"} <= records[0].keys()
    assert set(records[0]["msr"]) == {"single_qa", "multihop_qa", "summarization", "code", "in_context"}
    assert (whole / "training.png").stat().st_size > 10_000
    assert list((whole / "tensorboard").iterdir())
    assert json.loads((whole / "settings.json").read_text())["steps"] == STEPS


def test_figures_from_a_finished_run(whole):
    (whole / "training.png").unlink()
    result = run([sys.executable, "-m", "experiments.figures", f"--out={whole}"])
    assert result.returncode == 0, result.stderr
    assert (whole / "training.png").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"setting": "fa_xa", "xattn_stride": 4, "penalty": "signed", "loss_on": "answer"},
        {"setting": "xa_ssa", "xattn_stride": 4, "temperature": "exponential", "lower": "0.5,0.5,0.8,0.8,0.8", "upper": "0.7,0.7,1,1,1"},
    ],
)
def test_other_settings_train_and_evaluate(workshop, tmp_path, changes):
    result = run(command(workshop, tmp_path, steps=2, **changes))
    assert result.returncode == 0, result.stderr
    evaluate = ["-m", "experiments.evaluate", "--suite=heldout", f"--out={tmp_path}", "--rows=2", "--random_seeds=2", "--batch_size=3"]
    result = run([sys.executable, *evaluate])
    assert result.returncode == 0, result.stderr
    assert "| single_qa | 2 |" in result.stdout
    report = json.loads((tmp_path / "heldout.json").read_text())
    assert set(report["classes"]) == {"single_qa", "multihop_qa", "summarization", "code", "in_context"}
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_other_data_under_the_same_name_is_refused(workshop, whole):
    out = workshop / "changed"
    shutil.copytree(whole, out)
    data = workshop / "packed.parquet"
    kept = data.read_bytes()
    try:
        pq.write_table(pq.read_table(data).slice(1), data)
        result = run(command(workshop, out))
    finally:
        data.write_bytes(kept)
    assert result.returncode == 1
    assert "other settings (data_sha256" in result.stderr


def test_tokens_that_the_model_does_not_have_are_refused(workshop, tmp_path):
    rows = pq.read_table(workshop / "packed.parquet").to_pylist()
    rows[3]["input_ids"][5] = rows[3]["labels"][5] = 97
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "wide.parquet")
    result = run(command(workshop, tmp_path / "out", data=f"packed:{tmp_path}/wide.parquet"))
    assert result.returncode == 1
    assert "document 'wide.parquet:3:0' has token id 97: the model's are 0 to 96" in result.stderr


def test_damaged_runs_are_named(workshop, whole, tmp_path):
    def damaged(change):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(whole, out)
        change(out)
        return run(command(workshop, out)).stderr

    assert "settings.json is damaged" in damaged(lambda out: (out / "settings.json").write_text("{"))
    assert "has checkpoints but no settings.json" in damaged(lambda out: (out / "settings.json").unlink())
    assert f"checkpoint of step {STEPS}" in damaged(lambda out: shutil.rmtree(out / "checkpoints" / str(STEPS) / "state"))
    assert "line 2 is damaged" in damaged(
        lambda out: (out / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text().replace('{"step": 1,', '{"step": "x",'))
    )


def test_benchmark_prints_json_lines(workshop):
    arguments = [f"--model={workshop / 'model'}", "--tokens=128", "--block_size=16", "--sink_tokens=16", "--local_tokens=32", "--samples=1"]
    result = run([sys.executable, "-m", "experiments.benchmark", "--what=train_step", *arguments])
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["tokens"] == 128
    assert {"tokens_per_second", "temporary_gib", "device", "jax", "median_ms"} <= record.keys()


@pytest.mark.parametrize("program", ["evaluate", "figures"])
def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path, program):
    result = run([sys.executable, "-m", f"experiments.{program}", f"--out={tmp_path}"])
    assert result.returncode == 1
    assert "holds no" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "qwen3_4b"}, "--model=qwen3_4b is a preset without weights: add --weights="),
        ({"model": "nowhere"}, "nowhere"),
        ({"data": "wikipedia"}, "source 'wikipedia': accepted are corpus"),
        ({"block_size": 8}, "block_size=8: accepted are powers of two"),
        ({"pack_tokens": 100}, "pack_tokens=100"),
        ({"pack_tokens": 1024}, "--max_tokens=1024 is beyond the model's 512 positions"),
        ({"max_tokens": 10}, "none is left to train on"),
        ({"t_sensitive": 1.7}, "accepted are values in [0, 1]"),
        ({"lower": "0.1,0.2"}, "--lower and --upper go together"),
        ({"steps": 0}, "steps=0"),
        ({"seed": -1}, "seed=-1"),
        ({"weight_decay": "nan"}, "weight_decay=nan"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"yarn_factor": 0}, "factor=0.0"),
        ({"out": "gs://bucket/run"}, "cannot be a run's folder"),
        ({"global_batch": 3, "packs_per_device": 2}, "global_batch=3 is not a multiple"),
    ],
)
def test_bad_input_is_one_line_that_names_it(workshop, tmp_path, changes, message):
    result = run(command(workshop, **({"out": tmp_path / "out"} | changes)))
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_another_runs_folder_is_refused_and_left_alone(workshop, whole):
    out = workshop / "copied"
    shutil.copytree(whole, out)
    result = run(command(workshop, out, seed=7))
    assert result.returncode == 1
    assert "other settings (seed: 42 there, 7 now)" in result.stderr
    assert_same_run(whole, out)


def test_out_of_memory_is_one_line():
    with pytest.raises(SystemExit, match="error: the device is out of memory .*17179869184"), errors_in_one_line():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), errors_in_one_line():
        raise jax.errors.JaxRuntimeError("INTERNAL: a defect")
