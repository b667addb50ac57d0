"""The training step: what it trains, what it leaves alone, and that batching, devices and restarts do not change it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_jax.checkpoints import RunDirectory
from elastic_jax.data.tasks import TaskClass
from elastic_jax.objective import PenaltyConfig
from elastic_jax.optim import OptimizerConfig
from elastic_jax.plan import model_sparsity
from elastic_jax.trainer import TrainConfig, binary_entropy, data_mesh, init_state, make_train_step, shard_batch
from elastic_jax.training_loop import NonFiniteLossError, read_metrics, train
from tests.tiny import BLOCK, SyntheticPacks, tiny_model

CONFIG = TrainConfig(optimizer=OptimizerConfig(steps=4, warmup=0.0, router_lr=1e-2), global_batch=4)


def mesh():
    return data_mesh(jax.devices()[:1])


def run_steps(config, count=2, model_and_backbone=None):
    model, backbone = model_and_backbone or tiny_model()
    step, state, packs, metrics = make_train_step(model, config, mesh()), init_state(model, config), SyntheticPacks(), []
    for number in range(count):
        state, m = step(state, backbone, shard_batch(packs.batch(number, config.micro_batches(1)), mesh()))
        metrics.append(jax.device_get(m))
    return state, metrics


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_backbone_is_untouched_and_routers_move():
    model, backbone = tiny_model()
    before = jax.tree.map(np.array, backbone)
    start = init_state(model, CONFIG)
    state, metrics = run_steps(CONFIG, model_and_backbone=(model, backbone))
    assert_trees_equal(before, backbone)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), start.trainable, state.trainable)
    assert all(value > 0 for value in jax.tree.leaves(moved))
    assert all(np.isfinite(m["loss"]) for m in metrics)


def test_no_gradient_of_the_backbone_is_computed():
    model, backbone = tiny_model()
    state, packs = init_state(model, CONFIG), SyntheticPacks()
    batch = jax.tree.map(lambda x: x[0], packs.batch(0, (1, 2)))

    def loss(trainable, backbone):
        hidden, routing = model.training_forward(trainable["router"], backbone, batch, key=jax.random.key(0), temperature=1.0)
        return hidden.sum() + model_sparsity(routing.is_full).sum()

    flops = lambda which: jax.jit(jax.grad(loss, which)).lower(state.trainable, backbone).compile().cost_analysis()["flops"]
    router_only, everything, forward = flops(0), flops((0, 1)), jax.jit(loss).lower(state.trainable, backbone).compile()
    assert router_only < everything
    # Projections and MLP cost one forward, one recomputed forward and one backward (activations); with dW it is one more.
    weight_flops = 2 * batch.tokens.size * sum(x[0].size for x in jax.tree.leaves(backbone["layers"]) if x.ndim == 3)
    assert everything - router_only > 0.9 * weight_flops
    assert router_only < forward.cost_analysis()["flops"] * 5

    step_state = jax.tree.leaves(state.optimizer)
    trained = sum(x.size for x in jax.tree.leaves(state.trainable))
    assert sum(x.size for x in step_state if x.ndim) == 2 * trained


@pytest.mark.parametrize("packs_per_device", [2, 4])
def test_micro_batches_do_not_change_the_step(packs_per_device):
    one, one_metrics = run_steps(CONFIG)
    other, other_metrics = run_steps(dataclasses.replace(CONFIG, packs_per_device=packs_per_device))
    assert_trees_close(one_metrics, other_metrics, rtol=2e-5, atol=1e-6)
    assert_trees_close(one.trainable, other.trainable, rtol=1e-3, atol=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    first, second = run_steps(CONFIG), run_steps(CONFIG)
    assert_trees_equal(first, second)
    other, _ = run_steps(dataclasses.replace(CONFIG, seed=7))
    assert not np.array_equal(first[0].trainable["multipliers"]["lambda1"], other.trainable["multipliers"]["lambda1"])


def test_metrics_are_what_they_say():
    _, metrics = run_steps(CONFIG, count=1)
    first, packs = metrics[0], SyntheticPacks().batch(0, (4, 1))
    tasks = packs.task.ravel()
    np.testing.assert_array_equal(first["documents"], [(tasks == c).sum() for c in range(5)])
    assert first["loss"] == pytest.approx(first["lm_loss"] + first["penalty"], rel=1e-6)
    present = first["documents"] > 0
    assert np.isnan(first["msr"][~present]).all()
    assert ((first["msr"][present] >= 0) & (first["msr"][present] <= 1)).all()
    np.testing.assert_allclose(first["entropy"][present], np.log(2), atol=1e-3)  # fresh routers do not know yet


def test_binary_entropy():
    np.testing.assert_allclose(binary_entropy(jnp.array([0.0, 50.0, -50.0])), [np.log(2), 0, 0], atol=1e-6)
    p = 0.3
    want = -p * np.log(p) - (1 - p) * np.log(1 - p)
    np.testing.assert_allclose(binary_entropy(jnp.log(p / (1 - p))), want, rtol=1e-6)


class ClassPacks(SyntheticPacks):
    """Each class has words of its own, so that a router can tell the classes apart."""

    def pack(self, index):
        pack = super().pack(index)
        word = pack.tokens % 19 + 19 * np.repeat(pack.task[pack.document], BLOCK)
        return dataclasses.replace(pack, tokens=word.astype(np.int32), targets=np.roll(word, -1).astype(np.int32))


def test_robust_classes_become_sparser_than_sensitive_ones():
    """Multipliers that rise fast make the targets bind: 1.0 for robust classes, 0.5 for sensitive ones here."""
    model, backbone = tiny_model()
    config = TrainConfig(
        optimizer=OptimizerConfig(steps=120, router_lr=1e-2, multiplier_lr=0.1),
        penalty=PenaltyConfig.from_targets(sensitive=0.5),
        global_batch=4,
        packs_per_device=4,
    )
    step, state, packs, metrics = make_train_step(model, config, mesh()), init_state(model, config), ClassPacks(), []
    for number in range(120):
        state, m = step(state, backbone, shard_batch(packs.batch(number, (1, 4)), mesh()))
        metrics.append(m)
    last = np.nanmean([jax.device_get(m["msr"]) for m in metrics[-20:]], axis=0)
    sensitive = np.array([task.sensitive for task in TaskClass])
    assert last[~sensitive].min() > last[sensitive].max() + 0.1


def loop(tmp_path, config=CONFIG, packs=None, **options):
    model, backbone = tiny_model()
    arguments = dict(tokens_per_pack=128, checkpoint_every=2) | options
    with RunDirectory(tmp_path, keep=1) as run:
        run.claim({"seed": config.seed})
        return train(model, backbone, packs or SyntheticPacks(), config, run, mesh(), **arguments)


class StopsAt(SyntheticPacks):
    """Sends SIGTERM to this process when the packs of a step are asked for."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def batch(self, step, shape):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(step, shape)


def test_a_run_stopped_by_sigterm_goes_on_bit_identically(tmp_path):
    whole, complete = loop(tmp_path / "whole")
    assert complete
    state, complete = loop(tmp_path / "parts", packs=StopsAt(3))
    assert not complete
    assert int(state.step) == 3
    resumed, complete = loop(tmp_path / "parts")
    assert complete
    assert_trees_equal(whole, resumed)
    timeless = lambda path: [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in read_metrics(path)]
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")


class Poisoned(SyntheticPacks):
    def batch(self, step, shape):
        batch = super().batch(step, shape)
        return dataclasses.replace(batch, loss_weights=batch.loss_weights * np.nan) if step == 3 else batch


def test_a_non_finite_loss_names_the_step_and_keeps_the_checkpoint(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"step 3: loss nan.*packs 12 to 15.*checkpoint is of step 2"):
        loop(tmp_path, packs=Poisoned())
    with RunDirectory(tmp_path) as run:
        assert run.latest_step == 2
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_folder_of_another_run_is_refused(tmp_path):
    with RunDirectory(tmp_path, keep=1) as run:
        run.claim({"seed": 1, "steps": 5})
        run.claim({"steps": 5, "seed": 1})
        with pytest.raises(ValueError, match=r"other settings \(seed: 1 there, 2 now\)"):
            run.claim({"seed": 2, "steps": 5})
        with pytest.raises(ValueError, match="in use by another training run"):
            RunDirectory(tmp_path, keep=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be a run's folder"):
        RunDirectory(tmp_path / "file", keep=1)
    with pytest.raises(ValueError, match="holds no run"):
        RunDirectory(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_reader_leaves_a_save_in_progress_alone(tmp_path):
    loop(tmp_path)
    saving = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
    saving.mkdir()
    with RunDirectory(tmp_path) as run:
        assert run.latest_step == 4
    assert saving.exists()


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="global_batch=6 is not a multiple of packs_per_device=2 x 2 devices"):
        TrainConfig(global_batch=6, packs_per_device=2).micro_batches(2)


def test_losses_agree_on_one_two_and_four_devices():
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    program = """
        import json
        import jax
        jax.config.update("jax_num_cpu_devices", 4)
        from elastic_jax.optim import OptimizerConfig
        from elastic_jax.trainer import TrainConfig, data_mesh, init_state, make_train_step, shard_batch
        from tests.tiny import SyntheticPacks, tiny_model
        model, backbone = tiny_model()
        config = TrainConfig(optimizer=OptimizerConfig(steps=4, warmup=0.0, router_lr=1e-2), global_batch=4)
        for devices in (1, 2, 4):
            mesh = data_mesh(jax.devices()[:devices])
            step, state = make_train_step(model, config, mesh), init_state(model, config)
            for number in range(2):
                state, metrics = step(state, backbone, shard_batch(SyntheticPacks().batch(number, config.micro_batches(devices)), mesh))
                print(json.dumps([devices, float(metrics["loss"]), float(metrics["grad_norm"])]))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    losses = {devices: [line[1:] for line in lines if line[0] == devices] for devices in (1, 2, 4)}
    assert len(lines) == 6
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-4)
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-4)
