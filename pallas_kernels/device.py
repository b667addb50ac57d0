"""What the choice of a kernel depends on: the device that a call is traced for."""

from __future__ import annotations

from typing import Any

import jax


def platform() -> str:
    """ "cpu", "gpu" for CUDA GPUs only, else JAX's name of it ("rocm", "tpu")."""
    device = _device()
    if device.platform not in ("gpu", "cuda"):
        return device.platform
    # JAX calls AMD's GPUs "gpu" as well; their capability is a name such as "gfx942".
    return "gpu" if _capability(device) is not None or not hasattr(device, "compute_capability") else "rocm"


def compute_capability() -> tuple[int, int] | None:
    """Such as (9, 0); None where it is not known, as for a device that a program is lowered for and that is not here."""
    return _capability(_device())


def cuda_obstacle() -> str | None:
    """What keeps a Triton or Mosaic kernel from running, which need a CUDA GPU from Ampere on; None where nothing does."""
    if (name := platform()) != "gpu":
        return f"a CUDA GPU, and this is a {name}"
    if (capability := compute_capability()) is not None and capability[0] < 8:
        return f"compute capability 8.0 or newer, and this device has {'.'.join(map(str, capability))}"
    return None


def _device() -> Any:
    """The abstract device where a program is lowered for one, else JAX's default device."""
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return abstract
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return default if default is not None and not isinstance(default, str) else jax.devices(default)[0]


def _capability(device: Any) -> tuple[int, int] | None:
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
