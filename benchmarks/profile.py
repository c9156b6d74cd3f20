"""Where the time of a round goes, part by part, and how far each part is from what the machine allows.

    python -m benchmarks.profile [heads | personal]

`heads`: the round of `benchmarks.peers` on one thread. `personal`: an epoch of personalising over features, of
`benchmarks.personal`. Every function named here is wrapped by a clock of the thread's CPU time; the time of a part is
without that of the parts it calls, and `the rest` is what no part has, the clocks among it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from threadpoolctl import threadpool_limits

from benchmarks.common import show
from benchmarks.peers import BATCH, RATE, SAMPLED, limit, table_of

HEADS = {
    "draw the batches": ["headstart.solvers.heads:batches"],
    "put clients into stacks": ["headstart.solvers.heads:_stacks"],
    "read rows in order": ["headstart.solvers.heads:_read_in_order"],
    "gather rows into batches": ["headstart.solvers.heads:_gather"],
    "look up labels and shares": ["headstart.solvers.heads:_read"],
    "products forward, bias": ["headstart.solvers.heads:_Heads._forward"],
    "softmax gradient": ["headstart.solvers.heads:_errors"],
    "products backward": ["headstart.solvers.heads:_Heads._backward"],
    "step": ["headstart.solvers.heads:_Heads._step"],
    "the rest of local training": ["headstart.solvers.heads:HeadSolver.__call__"],
    "receive the model": ["headstart.methods.training:Training.receive"],
    "updates of clients": ["headstart.methods.training:Training.client_update"],
    "encode replies": ["headstart.channel.channel:UpdateChannel.encode"],
    "read what clients keep": ["headstart.engine.client_states:ClientStates.read"],
    "write what clients keep": ["headstart.engine.client_states:ClientStates.write"],
    "check replies": ["headstart.channel.links:Check.decode"],
    "add up replies": ["headstart.core.update:Total.add"],
    "the rest of the engine": ["headstart.engine.round:play_round"],
}


class Clocks:
    """The CPU seconds of each part, without those of the parts that it calls."""

    def __init__(self, parts: dict[str, list[str]]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._open: list[float] = []
        for part, functions in parts.items():
            for function in functions:
                self._wrap(part, function)

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds.clear()
        self.calls.clear()

    def _wrap(self, part: str, function: str) -> None:
        module, _, path = function.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*given: Any, **named: Any) -> Any:
            return self._timed(part, lambda: original(*given, **named))

        @functools.wraps(original)
        def generator(*given: Any, **named: Any) -> Iterator[Any]:
            items, end = original(*given, **named), object()
            while (item := self._timed(part, lambda: next(items, end))) is not end:
                yield item

        setattr(owner, name, generator if inspect.isgeneratorfunction(original) else timed)

    def _timed(self, part: str, call: Callable[[], Any]) -> Any:
        self._open.append(0.0)
        start = time.thread_time()
        try:
            return call()
        finally:
            took = time.thread_time() - start
            inner = self._open.pop()
            self.seconds[part] += took - inner
            self.calls[part] += 1
            if self._open:
                self._open[-1] += took


def heads(rounds: str = "200") -> None:
    """A round of heads: every part beside what the same work takes alone."""
    from headstart.runner import run

    count, given, wall, marks = int(rounds), table_of(), list[float](), list[float]()
    stage = {"method": "fedavg", "train": "head", "rounds": 2 * count, "clients_per_round": SAMPLED, "lr": RATE}
    stage |= {"batch_size": BATCH, "head_init": "zeros", "evaluate_every": count}
    clocks = Clocks(HEADS)

    def half(_: Any) -> None:
        marks.append(time.thread_time())
        wall.append(time.perf_counter())
        if len(marks) == 1:
            clocks.reset()

    run({"model": {"backbone": "features"}, "stages": [stage]}, data=given, on_metrics=half)
    whole = (marks[1] - marks[0]) / count
    table(f"A round of heads, one thread, mean of {count} rounds with a clock on every part", clocks, count, whole)
    bound = limit(time.thread_time)
    print(
        f"\nThe limit: {1e3 * bound['seconds']:.2f} ms = rows read once in order {1e3 * bound['reading']:.2f} "
        f"({bound['gigabytes_per_second']:.1f} GB/s) + products {1e3 * bound['products']:.2f} "
        f"({bound['gigaflops']:.0f} GFLOP/s at these shapes). The round, with clocks, is "
        f"{whole / bound['seconds']:.2f} times that; by the wall clock it took "
        f"{1e3 * (wall[1] - wall[0]) / count:.2f} ms."
    )


def personal(turns: str = "3") -> None:
    """Five epochs of personalising over features, beside the same steps in a plain loop."""
    from benchmarks.personal import sides

    found = sides("features")
    tune, plain = found["kept"], found["plain"]
    clocks, whole, loop, count = Clocks(HEADS), 0.0, 0.0, int(turns)
    tune()
    clocks.reset()
    for _ in range(count):
        start = time.thread_time()
        tune()
        middle = time.thread_time()
        plain()
        whole, loop = whole + (middle - start) / count, loop + (time.thread_time() - middle) / count
    table(f"Personalising 100 clients over features, five epochs, one thread, mean of {count}", clocks, count, whole)
    print(f"\nThe plain loop: {1e3 * loop:.0f} ms; with clocks, {whole / loop:.2f} times that.")


def table(title: str, clocks: Clocks, count: int, whole: float) -> None:
    """Parts with their time, share and calls."""
    rows = [(part, clocks.seconds[part] / count, clocks.calls[part] / count) for part in HEADS if clocks.calls[part]]
    rows += [("the rest", whole - sum(each for _, each, _ in rows), 0), ("all", whole, 0)]
    cells = [(part, f"{1e3 * each:.2f}", f"{100 * each / whole:.0f}", f"{calls:.0f}" if calls else "")
             for part, each, calls in rows]  # fmt: skip
    show(title, ("part", "CPU ms", "%", "calls"), cells)


if __name__ == "__main__":
    threadpool_limits(1)
    globals()[sys.argv[1] if sys.argv[1:] else "heads"](*sys.argv[2:])
