"""A network cable between two interfaces, as a process: `python cable.py ONE OTHER DELAY LOSS SEED`.

A packet that comes out of one interface goes into the other DELAY seconds later or, with the probability LOSS, never.
The kernel sees two TUN devices, which vanish with the process; unlike `tc netem`, they are in every kernel with TUN.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def interface(name: str) -> int:
    """A new TUN device; reading takes a packet that was sent through it, writing lets it receive one."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def main(one: str, other: str, delay: float, loss: float, seed: int) -> None:
    """Carry packets until the process is ended."""
    ends = interface(one), interface(other)
    print("ready", flush=True)
    rng, number = random.Random(seed), 0
    under_way: list[tuple[float, int, int, bytes]] = []
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select(ends, (), (), patience)
        for end in ready:
            packet, number = os.read(end, 65536), number + 1
            if rng.random() >= loss:
                heapq.heappush(under_way, (time.monotonic() + delay, number, ends[end == ends[0]], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(under_way)
            with suppress(OSError):  # not up yet, or full: lost
                os.write(end, packet)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
