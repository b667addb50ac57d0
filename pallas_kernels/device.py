"""What the kernels' choices depend on: the device that a call is traced for."""

from __future__ import annotations

import jax


def platform() -> str:
    """ "cpu", "gpu" or "tpu"; of the abstract device where a program is lowered for one that is not here."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if abstract is None else abstract.platform
    return "gpu" if name in ("gpu", "cuda") else name


def compute_capability() -> str | None:
    """Of the first device, such as "9.0"; None where it has none, as a CPU that lowers for a GPU."""
    return getattr(jax.devices()[0], "compute_capability", None)
