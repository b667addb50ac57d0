"""Inference on several devices of one process: each has the weights, and whole batches go to whichever is free.

A batch is the same on any number of devices, so its results are too.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")

_END: Any = object()


def copy_to(device: Any, arrays: T) -> T:
    """The arrays on another device, where they stay; one that is in several places is copied once."""
    copies: dict[int, jax.Array] = {}

    def copy(x: jax.Array) -> jax.Array:
        if id(x) not in copies:
            copies[id(x)] = jax.device_put(x, device)
        return copies[id(x)]

    return jax.tree.map(copy, arrays)


def map_batches(workers: Sequence[W], batches: Iterable[T], function: Callable[[W, T], R]) -> Iterator[tuple[T, R]]:
    """Yields each batch with function(worker, batch) as it is done; batches begin in their order, each with the first free worker.

    One worker runs in the caller's thread. Several have a thread each: after an error, or Ctrl-C, no further batch begins, those that run
    are finished and yielded, and then it is raised. A second Ctrl-C is raised at once.
    """
    if len(workers) == 1:
        for batch in batches:
            yield batch, function(workers[0], batch)
        return
    waiting, lock, stopped = iter(batches), threading.Lock(), threading.Event()
    done: queue.SimpleQueue[tuple[T, R] | BaseException | None] = queue.SimpleQueue()

    def work(worker: W) -> None:
        try:
            while True:
                with lock:
                    if stopped.is_set():
                        return
                    batch = next(waiting, _END)
                if batch is _END:
                    return
                done.put((batch, function(worker, batch)))
        except BaseException as error:
            stopped.set()
            done.put(error)
        finally:
            done.put(None)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    failure, running = None, len(threads)
    with _first_ctrl_c(stopped) as interrupted:
        try:
            for thread in threads:
                thread.start()
            while running:
                result = done.get()
                if result is None:
                    running -= 1
                elif isinstance(result, BaseException):
                    failure = failure or result
                else:
                    yield result
        except KeyboardInterrupt:  # the second one does not wait
            threads.clear()
            raise
        finally:
            stopped.set()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
    if failure is not None:
        raise failure
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def _first_ctrl_c(stopped: threading.Event) -> Iterator[threading.Event]:
    """Makes the first Ctrl-C set `stopped` and the event that it yields, wherever the main thread is; the second one is an ordinary one."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def take(*_: Any) -> None:
        print("finishing the batches that run; Ctrl-C again ends at once", file=sys.stderr)
        interrupted.set()
        stopped.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, take)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
