"""Several clients at once: processes forked from this one, which share its memory, the backbone's weights among it.

A page of memory is copied when a worker writes to it: weights that no client trains are there once. Workers are forked
when a stage first needs them, and live as long as it does, so that what they prepare of the examples is prepared once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from headstart.errors import HeadstartError

WORKERS = "HEADSTART_WORKERS"


class Worker(Protocol):
    """What a process does, once and for every job."""

    def prepare_worker(self) -> None:
        """In the new process, before its first job."""

    def work(self, job: Any) -> Any:
        """The result of a job."""


def worker_count() -> int:
    """How many workers the environment asks for; 1: none beside this process."""
    given = os.environ.get(WORKERS, "1")
    if not given.isdecimal() or int(given) < 1:
        raise HeadstartError(f"{WORKERS} must be a whole number, 1 or more (got {given!r})")
    if int(given) > 1 and "fork" not in multiprocessing.get_all_start_methods():
        raise HeadstartError(f"{WORKERS}: this system cannot fork processes; leave it out")
    return int(given)


class Workers:
    """Processes that do the same work on one job each; jobs and results are pickled."""

    def __init__(self, worker: Worker, count: int) -> None:
        """worker: held weakly; its processes end with it."""
        self._worker, self._count = weakref.ref(worker), count
        self._processes: dict[Connection, Any] = {}
        weakref.finalize(self, _end, self._processes, os.getpid())

    def map(self, jobs: Sequence[Any]) -> Iterator[Any]:
        """The result of each job, in the order of the jobs, whoever is done first; an error of a worker is raised."""
        self._start(min(self._count, len(jobs)))
        free, busy, done = deque(self._processes), dict[Connection, int](), dict[int, Any]()
        given = turn = 0
        try:
            while turn < len(jobs):
                # Results that wait for their turn are held here: nobody runs far ahead of the slowest.
                while free and given < min(len(jobs), turn + 4 * self._count):
                    pipe = free.popleft()
                    pipe.send(jobs[given])
                    busy[pipe], given = given, given + 1
                for ready in wait(list(busy)):
                    pipe = cast(Connection, ready)
                    done[busy.pop(pipe)] = self._result(pipe)
                    free.append(pipe)
                while turn in done:
                    yield done.pop(turn)
                    turn += 1
        finally:
            if turn < len(jobs):  # what is under way is nobody's any more
                _end(self._processes, os.getpid())

    def _start(self, count: int) -> None:
        """So many processes, at least."""
        import torch

        if torch.cuda.is_available():
            raise HeadstartError(f"{WORKERS}: processes cannot share a backbone on a GPU; leave it out")
        fork, threads = multiprocessing.get_context("fork"), max(1, torch.get_num_threads() // self._count)
        while len(self._processes) < count:
            here, there = fork.Pipe()
            process = fork.Process(target=_serve, args=(self._worker(), there, [here, *self._processes], threads))
            process.daemon = True
            with warnings.catch_warnings():  # from Python 3.12 on: threads of this process are not those of the fork
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            self._processes[here] = process

    def _result(self, pipe: Connection) -> Any:
        try:
            good, value = pipe.recv()
        except (EOFError, ConnectionError):
            process = self._processes[pipe]
            process.join(5)
            code = process.exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
            raise HeadstartError(
                f"a worker process {how}; where memory is short, set {WORKERS} to fewer, or leave it out"
            ) from None
        if good:
            return value
        try:
            raise value if isinstance(value, HeadstartError) else RuntimeError(f"in a worker process:\n{value}")
        finally:
            del value  # an error that its own traceback holds would keep the processes alive


def _serve(worker: Worker, pipe: Connection, others: list[Connection], threads: int) -> None:
    """Work on jobs until the pipe is closed.

    In a thread of its own: the threads that OpenMP has started for the one that was forked are not there any more, and
    waiting for them would be for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    for each in others:
        each.close()
    thread = threading.Thread(target=_loop, args=(worker, pipe, threads))
    thread.start()
    thread.join()


def _loop(worker: Worker, pipe: Connection, threads: int) -> None:
    """Jobs, one after the other."""
    import torch

    torch.set_num_threads(threads)
    worker.prepare_worker()
    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = True, worker.work(job)
        except HeadstartError as error:
            result = False, error
        except Exception:
            result = False, traceback.format_exc()
        pipe.send(result)


def _end(processes: dict[Connection, Any], owner: int) -> None:
    """End processes that are still there; a fork of their owner leaves them alone."""
    while processes and os.getpid() == owner:
        pipe, process = processes.popitem()
        pipe.close()
        process.kill()
        process.join()
