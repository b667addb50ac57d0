"""Training in several processes: joining them, and the few things on which they must agree.

All processes run the same program on the same data. Each holds the whole backbone and puts its own part of every batch on its own devices;
the first process writes the run's folder and talks to the user. With one process everything here is a plain call.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_ERROR_BYTES = 4096
# A process that ends alone waits so long for the others; then the coordinator ends them too.
_SHUTDOWN_SECONDS = 60


def join_processes(timeout: int = 300) -> None:
    """Makes this process one of several that train together; to be called before JAX is used.

    Who they are is told by JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, else by Slurm,
    Open MPI or Kubernetes, which JAX recognises; JAX_LOCAL_DEVICE_IDS limits the process to some of the node's GPUs.

    Args:
      timeout: seconds after which the program ends, with exit status 1, because not all processes are there.

    Raises:
      ValueError: nothing tells who they are, or one of these variables is missing or no such number.
    """
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    arguments: dict[str, Any] = {}
    who = "processes of a cluster"
    if given:
        if missing := [name for name in _NAMES if name not in given]:
            raise ValueError(f"{missing[0]} is not set, but {next(iter(given))} is: all of {', '.join(_NAMES)} are needed")
        address, (count, number) = given[_NAMES[0]], (_whole_number(given, name) for name in _NAMES[1:])
        if not number < count:
            raise ValueError(f"JAX_PROCESS_ID={number}: accepted are 0 to {count - 1}, since JAX_NUM_PROCESSES={count}")
        if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
            raise ValueError(f"JAX_COORDINATOR_ADDRESS={address}: accepted is the host and port of process 0, such as 10.0.0.1:1234")
        # Slurm would be asked for the devices, and gives each process one.
        who = f"process {number} of {count}, coordinator {address}"
        arguments = dict(coordinator_address=address, num_processes=count, process_id=number, cluster_detection_method="deactivate")

    def give_up() -> None:
        # Where JAX itself gives up it aborts with a stack trace.
        print(f"error: {who}: not all processes were there within {timeout} s", file=sys.stderr, flush=True)
        os._exit(1)

    # Its handler of SIGTERM would take the place of training's.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=timeout + 60, shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
    except ValueError as error:
        accepted = f"set {', '.join(_NAMES)}, or start it with Slurm or Open MPI"
        raise ValueError(f"nothing tells which processes train together ({error}): {accepted}") from error
    finally:
        timer.cancel()


def _whole_number(given: dict[str, str], name: str) -> int:
    if not given[name].isdecimal():
        raise ValueError(f"{name}={given[name]}: a whole number is needed")
    return int(given[name])


def is_first() -> bool:
    """Whether this is the process that writes files and talks to the user."""
    return jax.process_index() == 0


def in_first(action: Callable[[], T]) -> T | None:
    """What `action` returns in the first process, None in the others, which wait for it; its error becomes an error of all."""
    if jax.process_count() == 1:
        return action()
    result, error, text = None, None, b""
    if is_first():
        try:
            result = action()
        except Exception as caught:
            error, text = caught, (str(caught) or type(caught).__name__).encode()[:_ERROR_BYTES]
    padded = np.frombuffer(text.ljust(_ERROR_BYTES, b"\0"), np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().rstrip(b"\0")
    if error is not None:
        raise error
    if told:
        raise ValueError(told.decode(errors="replace"))
    return result


def in_any(flag: bool) -> bool:
    """Whether the flag is set in any process; all must ask."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def check_same(what: str, value: str) -> None:
    """ValueError in all processes where `value` is not the same in all."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    if differing := np.flatnonzero((digests != digests[0]).any(axis=1)).tolist():
        raise ValueError(f"processes 0 and {differing[0]} differ in {what}: all need the same flags, the same files and the same folder")
