"""Inference on several devices equals that on one; errors and Ctrl-C lose nothing that was done, and nothing hangs."""

import json
import subprocess
import sys
import textwrap
import threading
import time

import jax
import pytest

from elastic_jax.elastic import split_layers
from elastic_jax.generate import Generator
from elastic_jax.replicas import map_batches
from tests.test_generate import LONG, TOKENIZER, VOCABULARY
from tests.tiny import lively_model


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_every_batch_is_done_once_and_they_begin_in_order(workers):
    begun, lock = [], threading.Lock()

    def run(worker, batch):
        with lock:
            begun.append(batch)
        time.sleep(0.002 * (batch % 3))
        return worker, batch**2

    results = list(map_batches(range(workers), iter(range(20)), run))
    assert sorted(batch for batch, _ in results) == list(range(20))
    assert all(square == batch**2 and 0 <= worker < workers for batch, (worker, square) in results)
    assert max(abs(place - batch) for place, batch in enumerate(begun)) < workers
    assert list(map_batches(range(workers), [], run)) == []


def test_after_an_error_the_running_batches_are_finished_and_then_it_is_raised():
    running, done, begun = threading.active_count(), [], threading.Barrier(3)

    def run(_, batch):
        begun.wait(10)
        if batch == 1:
            raise ValueError("batch 1")
        time.sleep(0.05)
        return batch

    def collect():
        for batch, _ in map_batches(range(3), range(100), run):
            done.append(batch)

    with pytest.raises(ValueError, match="batch 1"):
        collect()
    assert sorted(done) == [0, 2]
    assert threading.active_count() == running


def test_an_error_of_the_batches_or_of_the_caller_ends_the_threads():
    def broken():
        yield 0
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        list(map_batches(range(3), broken(), lambda _, batch: batch))
    running = threading.active_count()

    def caller():
        for _ in map_batches(range(3), range(100), lambda _, batch: batch):
            raise RuntimeError("caller")

    with pytest.raises(RuntimeError, match="caller"):
        caller()
    assert threading.active_count() <= running


def test_ctrl_c_keeps_the_running_batches():
    """In a process of its own, which interrupts itself."""
    program = """
        import os, signal, threading, time
        from elastic_jax.replicas import map_batches

        def run(worker, batch):
            if batch < 3:
                started.wait()
            time.sleep(0.1 if batch == 0 else 0.3)
            return batch

        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signals in (1, 2):
            done, started = [], threading.Barrier(3)
            try:
                for batch, _ in map_batches(range(3), range(100), run):
                    for _ in range(signals):  # while the caller has a result in hand
                        os.kill(os.getpid(), signal.SIGINT)
                        time.sleep(0.01)
                    done.append(batch)
                    signals = 0
            except KeyboardInterrupt:
                print(sorted(done))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True)
    first, second = map(json.loads, result.stdout.splitlines())
    assert first[:3] == [0, 1, 2]
    assert len(first) <= 4  # the worker of batch 0 may have begun another
    assert second == []
    assert result.stderr.count("Ctrl-C again ends at once") == 2


def test_three_devices_give_the_results_of_one(tmp_path):
    """Suites and held-out documents, with fewer and with more devices than batches; in a process of its own for its devices."""
    program = """
        import json, pathlib, sys
        import jax
        jax.config.update("jax_num_cpu_devices", 3)
        import numpy as np
        from elastic_jax.evaluation.heldout import HeldoutScorer, heldout_batches
        from elastic_jax.evaluation.metrics import METRICS
        from elastic_jax.evaluation.results import read_timings
        from tests import test_evaluation_runner as runner
        from tests.test_generate import generator
        from tests.test_heldout import packs
        from tests.tiny import tiny_model

        METRICS["checksum"] = runner.checksum
        devices, model, out = jax.devices(), generator(cache_gib=None), pathlib.Path(sys.argv[1])
        assert len(devices) == 3
        samples = runner.samples()[:8]
        runner.run(out / "one", model, samples, batch_size=2, temperature=0.7)
        expected = runner.lines(out / "one")
        models = model.on(devices)
        assert models[0] is model
        for device, copy in zip(devices[1:], models[1:]):
            places = {place for x in jax.tree.leaves((copy.backbones, copy.router)) for place in x.devices()}
            assert places == {device}, places
            embeddings = {id(backbone["embedding"]) for backbone in copy.backbones}
            assert len(embeddings) == 1
        for wanted, name, rows in ((devices, "three", 2), (devices, "few", 4), (devices[1:], "others", 4)):
            runner.run(out / name, model, samples, batch_size=rows, temperature=0.7, devices=wanted)
            assert runner.lines(out / name) == expected, name
        timings = read_timings(out / "three")
        assert len(timings) == 4 and sum(timing["first"] for timing in timings) >= 2
        # Nothing that one device computes passes through another.
        with jax.transfer_guard_device_to_device("disallow"):
            text = models[2].generate([runner.LONG], max_new_tokens=9).completions[0].text
        assert text == model.generate([runner.LONG], max_new_tokens=9).completions[0].text

        tiny, backbone = tiny_model()
        router = jax.tree.map(lambda x: x * 30, tiny.init_router(jax.random.key(1)))
        batches = heldout_batches(packs(5), [""] * 5, 2)
        one = HeldoutScorer(tiny, backbone, router, batches)
        for count in (2, 3):
            shared = HeldoutScorer(tiny, backbone, router, batches, devices=devices[:count])
            routed = one.routed()
            jax.tree.map(np.testing.assert_array_equal, vars(routed), vars(shared.routed()))
            forced = 1 - routed.is_full
            jax.tree.map(np.testing.assert_array_equal, vars(one.forced(forced)), vars(shared.forced(forced)))
        print("equal")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("equal\n")


@pytest.mark.gpu
def test_two_gpus_generate_what_one_does():
    if len(devices := jax.devices()) < 2 or jax.default_backend() != "gpu":
        pytest.skip("two GPUs are needed")
    model, backbone, router = lively_model(changes={"vocab_size": VOCABULARY}, implementation="xla")
    models = Generator(model, split_layers(backbone), router, TOKENIZER).on(devices[:2])
    prompts = [LONG[number:] for number in range(4)]

    def generate(model, prompt):
        with jax.transfer_guard_device_to_device("disallow"):
            return model.generate([prompt], max_new_tokens=9).completions[0].tokens.tolist()

    expected = {prompt: generate(models[0], prompt) for prompt in prompts}
    assert dict(map_batches(models, prompts, generate)) == expected
