"""Checkpoints of a training run, with Orbax: atomic, the newest `keep` of them, each with the settings that made it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import IO, Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from elastic_jax.checks import differences
from elastic_jax.config import RouterConfig, SparsityConfig
from elastic_jax.elastic import Arrays, ElasticModel
from elastic_jax.files import lock, replacing
from elastic_jax.processes import check_same, in_first
from elastic_jax.trainer import TrainConfig, TrainState, data_mesh, init_state

_SETTINGS = "settings.json"
_FORMER_SETTINGS = ("packs_per_device",)  # in older runs; they may change now


class RunDirectory:
    """A run's folder, to be used in a `with` statement.

    It holds `settings.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/` and whatever programs add. Of several processes that train
    together all open it, save and load; the first one holds the lock and writes the files beside the checkpoints.

    Args:
      path: the folder.
      keep: for a training run, how many checkpoints stay: the folder is made if absent, and no other training run can use it
        meanwhile. None only reads, also while a run trains.

    Raises:
      ValueError: the path is a file or cannot be written, holds no run to read, or is in use by another training run.
    """

    def __init__(self, path: str | Path, *, keep: int | None = None):
        if not str(path) or "://" in str(path):
            raise ValueError(f"{str(path)!r} cannot be a run's folder: give a local path")
        self.path = Path(path).absolute()
        self._lock: IO[bytes] | None = None
        checkpoints = self.path / "checkpoints"
        if keep is None:
            if not checkpoints.is_dir():
                raise ValueError(f"{path} holds no run: give a folder that experiments.train made")
        elif keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        else:
            in_first(self._take)
        self._checkpointer = ocp.training.Checkpointer(
            str(checkpoints),
            # Orbax's own policies do not match the protocol that it declares for them.
            preservation_policy=None if keep is None else cast(Any, ocp.training.preservation_policies.LatestN(keep)),
            # What a killed run left half-written. A reader must not: it may be a save in progress.
            cleanup_tmp_directories=keep is not None,
        )

    def _take(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / ".lock", f"{self.path} is in use by another training run")
        except OSError as error:
            raise ValueError(f"{self.path} cannot be a run's folder: {error.strerror}") from error

    def settings(self) -> dict[str, Any]:
        """The settings that the run was started with; ValueError where the folder holds no run."""
        file = self.path / _SETTINGS
        if not file.exists():
            raise ValueError(f"{self.path} holds no run: {_SETTINGS} is missing")
        try:
            settings = json.loads(file.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{file} is damaged: a JSON object is needed")
        return settings

    def claim(self, settings: dict[str, Any]) -> None:
        """Records the run's settings; ValueError where the folder holds a run with others, naming each that differs, or where it is not the
        same folder for all processes."""
        in_first(lambda: self._claim(json.loads(json.dumps(settings))))
        self._check_shared()

    def _claim(self, settings: dict[str, Any]) -> None:
        file = self.path / _SETTINGS
        if file.exists():
            old = {name: value for name, value in self.settings().items() if name not in _FORMER_SETTINGS}
            if differing := differences(old, settings):
                raise ValueError(f"{self.path} holds a run with other settings ({differing}): give another folder")
        elif self.latest_step is not None:
            raise ValueError(f"{self.path} has checkpoints but no {_SETTINGS}, so it cannot be told whose they are: give another folder")
        else:
            with replacing(file) as partial:
                partial.write_text(json.dumps(settings, indent=2) + "\n")

    def _check_shared(self) -> None:
        """ValueError in all processes where not all of them see the first one's settings in this folder."""
        file = self.path / _SETTINGS
        for _ in range(50):  # a network file system may show a new file some seconds later
            if file.exists():
                break
            time.sleep(0.1)
        check_same(f"what they find in {self.path}", file.read_text() if file.exists() else "nothing")

    def shapes(self) -> Any:
        """Shapes of the arrays in the newest checkpoint, a tuple in the place of each."""
        metadata = self._checkpointer.metadata(self.latest_step).metadata
        return jax.tree.map(lambda x: tuple(x.shape), metadata)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint beside the last one and renames it when complete."""
        step = int(state.step)
        if step != self.latest_step:
            self._checkpointer.save(step, state, custom_metadata=self.settings())

    def load(self, like: TrainState, mesh: Mesh) -> TrainState:
        """The newest checkpoint, replicated over the mesh; `like` gives structure, shapes and dtypes."""
        replicated = NamedSharding(mesh, P())
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), like)
        try:
            return self._checkpointer.load(self.latest_step, abstract)
        except Exception as error:  # Orbax raises a different one for every kind of damage
            raise ValueError(
                f"the checkpoint of step {self.latest_step} in {self.path / 'checkpoints'} cannot be read ({type(error).__name__}): "
                "remove its folder to go on from the one before"
            ) from error

    def close(self) -> None:
        self._checkpointer.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run_configs(settings: dict[str, Any]) -> tuple[SparsityConfig, RouterConfig]:
    """What a run's settings say full and sparse mean, and how its routers look; ValueError where one is missing."""
    names = [*(field.name for field in dataclasses.fields(SparsityConfig)), "router_width", "pooling", "yarn_factor"]
    if missing := [name for name in names if name not in settings]:
        raise ValueError(f"the run's settings.json is damaged: {missing[0]} is missing")
    sparsity = SparsityConfig(**{field.name: settings[field.name] for field in dataclasses.fields(SparsityConfig)})
    return sparsity, RouterConfig(width=settings["router_width"], pooling=settings["pooling"])


def load_router(run: RunDirectory, model: ElasticModel) -> Arrays:
    """The routers of a run's newest checkpoint, for a model whose `router` is the run's own.

    Raises:
      ValueError: the run has no checkpoint yet, a damaged one, or one of another model.
    """
    if run.latest_step is None:
        raise ValueError(f"{run.path} holds no checkpoint yet")
    # The structure of the state is the same for every configuration of the training.
    like = jax.eval_shape(lambda: init_state(model, TrainConfig()))
    wanted, found = jax.tree.map(lambda x: x.shape, like.trainable["router"]), run.shapes()["trainable"]["router"]
    if wanted != found:
        shapes = lambda tree: ", ".join(sorted({str(shape) for shape in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))}))
        raise ValueError(f"{run.path} holds routers of another model: arrays of shapes {shapes(found)}; this model's are {shapes(wanted)}")
    loaded = run.load(like, data_mesh(jax.devices()[:1])).trainable["router"]
    # Bound to no mesh, as the backbone is: else every program of the prefill is compiled for arrays of both kinds.
    return jax.tree.map(jnp.asarray, jax.device_get(loaded))
