"""Training state and step: gradients of the routers and multipliers only, data parallel over one mesh axis.

Axis letters: A micro-batches, B packs of all devices, T tokens, C documents per pack, N task classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from elastic_jax import router as routing_lib
from elastic_jax.data.batch import PackedBatch
from elastic_jax.data.tasks import NUM_TASK_CLASSES
from elastic_jax.elastic import Arrays, ElasticModel
from elastic_jax.objective import (
    PenaltyConfig,
    init_multipliers,
    pack_means,
    sparsity_penalty,
    token_losses,
)
from elastic_jax.optim import OptimizerConfig, make_optimizer, schedule
from elastic_jax.plan import model_sparsity

T = TypeVar("T")
TemperatureSchedule = Literal["cosine", "exponential"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What makes a run the run that it is, apart from model and data. Defaults: the paper's Table 6.

    Attributes:
      optimizer: learning rates, schedules, number of steps.
      penalty: bounds of the sparsity per class, and the kind of penalty.
      temperature: `cosine` (what the released run used; the default, since the paper gives no temperatures for its
        exponential) or `exponential` (paper appendix F.3).
      temperature_start, temperature_end: the released run's 1.5 and 1.0.
      global_batch: packs per optimiser step over all devices and micro-batches.
      packs_per_device: packs that one device holds at a time.
      seed: of the routers, the multipliers and the routing noise.
    """

    optimizer: OptimizerConfig = OptimizerConfig()
    penalty: PenaltyConfig = PenaltyConfig.from_targets()
    temperature: TemperatureSchedule = "cosine"
    temperature_start: float = 1.5
    temperature_end: float = 1.0
    global_batch: int = 48
    packs_per_device: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        if self.temperature not in get_args(TemperatureSchedule):
            raise ValueError(f"temperature={self.temperature!r}: accepted are {', '.join(get_args(TemperatureSchedule))}")
        if not 0.0 < self.temperature_end <= self.temperature_start < math.inf:
            raise ValueError(
                f"temperature_start={self.temperature_start}, temperature_end={self.temperature_end}: accepted is 0 < end <= start"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: accepted are whole numbers from 0 to 2**32 - 1")
        for name in ("global_batch", "packs_per_device"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")

    def micro_batches(self, devices: int) -> tuple[int, int]:
        """(A, B): micro-batches per step and packs in each over `devices`; ValueError where they do not divide the batch."""
        packs = self.packs_per_device * devices
        if self.global_batch % packs:
            raise ValueError(
                f"global_batch={self.global_batch} is not a multiple of packs_per_device={self.packs_per_device} x {devices} devices"
            )
        return self.global_batch // packs, packs

    def temperature_at(self, progress: jax.Array | float) -> jax.Array:
        """Gumbel-softmax temperature at `progress` in [0, 1]."""
        function = routing_lib.cosine_temperature if self.temperature == "cosine" else routing_lib.exponential_temperature
        return function(progress, start=self.temperature_start, end=self.temperature_end)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a run needs to go on: what a checkpoint holds.

    Attributes:
      step: i32, optimiser steps done; also the data position, since a batch is a function of the step.
      trainable: {"router": ..., "multipliers": {"lambda1", "lambda2"}}, f32.
      optimizer: optax state of the trainable arrays.
      noise_key: u32, key data of the routing noise; a pack's noise is a function of it, the layer and the pack's number.
    """

    step: jax.Array
    trainable: dict[str, Any]
    optimizer: optax.OptState
    noise_key: jax.Array


class Noise(NamedTuple):
    """Key data of the routing noise (u32) and the Gumbel-softmax temperature (f32)."""

    key: jax.Array
    temperature: jax.Array


def init_state(model: ElasticModel, config: TrainConfig) -> TrainState:
    """The state before the first step, a function of the seed."""
    router_key, multiplier_key, noise_key = jax.random.split(jax.random.key(config.seed), 3)
    trainable = {"router": model.init_router(router_key), "multipliers": init_multipliers(multiplier_key)}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        trainable=trainable,
        optimizer=make_optimizer(config.optimizer).init(trainable),
        noise_key=jax.random.key_data(noise_key),
    )


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """One mesh axis, `data`, over the given devices (default: all of all processes)."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def shard_batch(batch: PackedBatch, mesh: Mesh) -> PackedBatch:
    """Puts [A, B, ...] numpy packs on the mesh, B split over its devices. Each process gives all packs and puts its own devices' there."""
    sharding = NamedSharding(mesh, P(None, "data"))
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), batch)


def replicate(arrays: T, mesh: Mesh) -> T:
    """Puts arrays on every device of the mesh; each process gives the same ones."""
    sharding = NamedSharding(mesh, P())

    # `jax.device_put` would compare the processes' arrays, which sends all weights through the network.
    def put(x: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [jax.device_put(x, device) for device in mesh.local_devices])

    return jax.tree.map(put, arrays)


def binary_entropy(logit: jax.Array) -> jax.Array:
    """Entropy in nats of a choice with log-odds `logit`: -p log p - (1 - p) log(1 - p)."""
    return jax.nn.softplus(logit) - logit * jax.nn.sigmoid(logit)


def make_train_step(
    model: ElasticModel, config: TrainConfig, mesh: Mesh
) -> Callable[[TrainState, Arrays, PackedBatch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the jitted step (state, backbone, batch[A, B, ...]) -> (state, metrics).

    The state is donated. The backbone is an argument that is only read: it gets no gradient and is not returned. The only
    collective is one sum over the devices of one vector, the trainable arrays' gradients and the metrics.

    Metrics (float32): `lm_loss`, `penalty`, `loss` (means over the step's packs), `grad_norm` (before clipping), `update_norm`,
    `temperature`, `router_lr`, `multiplier_lr`; and by task class, N values each: `documents`, `msr`, `document_penalty`, `entropy`
    (nats, of the router's probabilities), `lambda1`, `lambda2` (before the step). A class's means are NaN where it has no document.
    """
    optimizer = make_optimizer(config.optimizer)
    packs = config.global_batch

    def loss_of_shard(trainable: dict[str, Any], backbone: Arrays, batch: PackedBatch, noise: Noise):
        hidden, routing = model.training_forward(
            trainable["router"], backbone, batch, key=jax.random.wrap_key_data(noise.key), temperature=noise.temperature
        )
        losses, _ = token_losses(hidden, model.output_embedding(backbone), batch.targets)
        lm_loss = pack_means(losses, batch.loss_weights)
        sparsity = model_sparsity(routing.is_full)
        penalty, document_penalty = sparsity_penalty(sparsity, batch.task, trainable["multipliers"], config.penalty)
        entropy = jnp.mean(binary_entropy(routing.logit), axis=(0, 3))
        member = (batch.task[..., None] == jnp.arange(NUM_TASK_CLASSES)).astype(jnp.float32)
        by_class = partial(jnp.einsum, "BC,BCN->N", precision="highest")
        sums = {
            "lm_loss": jnp.sum(lm_loss) / packs,
            "penalty": jnp.sum(penalty) / packs,
            "documents": jnp.sum(member, axis=(0, 1)),
            "msr": by_class(sparsity, member),
            "document_penalty": by_class(document_penalty, member),
            "entropy": by_class(entropy, member),
        }
        return sums["lm_loss"] + sums["penalty"], sums

    def grads_of_shard(trainable: dict[str, Any], backbone: Arrays, batch: PackedBatch, noise: Noise):
        def micro(carry: Any, pack: PackedBatch) -> tuple[Any, None]:
            result = jax.grad(loss_of_shard, has_aux=True)(trainable, backbone, pack, noise)
            return jax.tree.map(jnp.add, carry, result), None

        shapes = jax.eval_shape(jax.grad(loss_of_shard, has_aux=True), trainable, backbone, jax.tree.map(lambda x: x[0], batch), noise)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # As one vector it is one all-reduce on every backend, not one for each array.
        vector, unravel = ravel_pytree(jax.lax.scan(micro, zeros, batch)[0])
        return unravel(jax.lax.psum(vector, "data"))

    sharded_grads = jax.shard_map(grads_of_shard, mesh=mesh, in_specs=(P(), P(), P(None, "data"), P()), out_specs=P(), check_vma=False)

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, backbone: Arrays, batch: PackedBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        temperature = config.temperature_at(state.step / config.optimizer.steps)
        grads, sums = sharded_grads(state.trainable, backbone, batch, Noise(state.noise_key, temperature))
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.trainable)
        documents = sums.pop("documents")
        by_class = {name: sums.pop(name) / documents for name in ("msr", "document_penalty", "entropy")}
        metrics = {
            **sums,
            **by_class,
            "loss": sums["lm_loss"] + sums["penalty"],
            "documents": documents,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "temperature": temperature,
            "router_lr": schedule(config.optimizer, config.optimizer.router_lr)(state.step),
            "multiplier_lr": schedule(config.optimizer, config.optimizer.multiplier_lr)(state.step),
            "lambda1": state.trainable["multipliers"]["lambda1"],
            "lambda2": state.trainable["multipliers"]["lambda2"],
        }
        new = TrainState(
            step=state.step + 1,
            trainable=cast(dict[str, Any], optax.apply_updates(state.trainable, updates)),
            optimizer=optimizer_state,
            noise_key=state.noise_key,
        )
        return new, metrics

    return step
