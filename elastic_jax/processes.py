"""Training in several processes: joining them, and the few things on which they must agree.

All processes run the same program on the same data. Each holds the whole backbone and puts its own part of every batch on its own devices;
the first process writes the run's folder and talks to the user. With one process everything here is a plain call.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
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
        if count < 1:
            raise ValueError("JAX_NUM_PROCESSES=0: at least 1 is needed")
        if not number < count:
            raise ValueError(f"JAX_PROCESS_ID={number}: accepted are 0 to {count - 1}, since JAX_NUM_PROCESSES={count}")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"JAX_COORDINATOR_ADDRESS={address}: accepted is the host and port of process 0, such as 10.0.0.1:1234")
        # Slurm would be asked for the devices, and gives each process one.
        who = f"process {number} of {count}, coordinator {address}"
        arguments = dict(coordinator_address=address, num_processes=count, process_id=number, cluster_detection_method="deactivate")

    def give_up() -> None:
        # Where JAX itself gives up it aborts with a stack trace.
        print(f"error: {who}: not all processes were there within {timeout} s", file=sys.stderr, flush=True)
        os._exit(1)

    if arguments.get("process_id") == 0:
        _check_port_is_free(arguments["coordinator_address"])

    # Its handler of SIGTERM would take the place of training's.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=timeout + 60, shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
    except ValueError as error:
        if given:
            raise ValueError(f"{who}: {error}") from error  # JAX_LOCAL_DEVICE_IDS
        accepted = f"set {', '.join(_NAMES)}, or start it with Slurm or Open MPI"
        raise ValueError(f"nothing tells which processes train together ({error}): {accepted}") from error
    except RuntimeError as error:
        raise ValueError(f"{who}: {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()


def _check_port_is_free(address: str) -> None:
    """Where it is taken, JAX ends with a segmentation fault."""
    port = address.rpartition(":")[2]
    try:
        with socket.create_server(("", int(port))):
            pass
    except OSError as error:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address}: process 0 cannot listen there ({error}); give a free port") from error


@contextlib.contextmanager
def leaving_the_others() -> Iterator[None]:
    """Ends this process at once where it fails: an ordinary exit would wait a minute for the others, which wait for this one."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


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
