"""Checkpoints of a training run, with Orbax: atomic, the newest `keep` of them, each with the settings that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from elastic_jax.trainer import TrainState

_SETTINGS = "settings.json"


class RunDirectory:
    """A run's folder, to be used in a `with` statement.

    It holds `settings.json`, `checkpoints/`, `metrics.jsonl`, `tensorboard/` and whatever programs add.

    Args:
      path: created if absent.
      keep: how many checkpoints stay.
    """

    def __init__(self, path: str | Path, *, keep: int = 1):
        self.path = Path(path).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"out={str(path)!r} is a file: accepted is a folder, new or of an earlier run")
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.path.mkdir(parents=True, exist_ok=True)
        self._checkpointer = ocp.training.Checkpointer(
            str(self.path / "checkpoints"),
            # Orbax's own policies do not match the protocol that it declares for them.
            preservation_policy=cast(Any, ocp.training.preservation_policies.LatestN(keep)),
            # What a killed run left half-written.
            cleanup_tmp_directories=True,
        )

    def settings(self) -> dict[str, Any]:
        """The settings that the run was started with; ValueError where the folder holds no run."""
        file = self.path / _SETTINGS
        if not file.exists():
            raise ValueError(f"{self.path} holds no run: {_SETTINGS} is missing")
        return json.loads(file.read_text())

    def claim(self, settings: dict[str, Any]) -> None:
        """Records the run's settings; ValueError where the folder holds a run with others, naming each that differs."""
        settings = json.loads(json.dumps(settings))
        file = self.path / _SETTINGS
        if file.exists():
            old = self.settings()
            differing = [
                f"{name}: {old.get(name)!r} there, {settings.get(name)!r} now"
                for name in sorted(old.keys() | settings.keys())
                if old.get(name) != settings.get(name)
            ]
            if differing:
                raise ValueError(f"{self.path} holds a run with other settings ({'; '.join(differing)}): give another folder")
        else:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(settings, indent=2) + "\n")
            partial.rename(file)

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
        return self._checkpointer.load(self.latest_step, abstract)

    def close(self) -> None:
        self._checkpointer.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
