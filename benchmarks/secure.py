"""Secure sums of 5,130 values beside Flower's own SecAgg+ helpers: CPU seconds of a client and of the server, bytes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import in_fresh_process, show
from headstart.channel.secure import Identity, SecureClient, SecureSum
from headstart.channel.secure.graph import Graph

VALUES, THRESHOLD, SESSION = 5130, 0.67, b"benchmark"
CELLS = tuple((clients, lost) for clients in (10, 100, 1000) for lost in (None, 0.0, 0.3))
"""Clients, and what share of them drops out; None: nobody may, and the threshold is 1."""
MEASURED = 5
"""Clients that check every signature, whose means are shown; the others take them as they are, for time."""
SAMPLE = 5
"""Secrets that are rebuilt to know what one takes, where rebuilding all would take hours."""


def main() -> None:
    """Every number of clients, each in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for clients, lost in CELLS:
        for side in ("headstart", "Flower's helpers") if lost is not None else ("headstart",):
            found = in_fresh_process("benchmarks.secure", side, clients, lost)
            cost = [f"{found[name]:,.{3 if found[name] < 1 else 1}f}" for name in ("client", "server")]
            dropouts = "not allowed" if lost is None else f"{lost:.0%}"
            rows.append((clients, dropouts, side, *cost, f"{found['up']:,}", f"{found['down']:,}"))
    show(
        f"A secure sum of {VALUES:,} values, threshold {THRESHOLD} (1 where nobody may drop out), one thread: CPU "
        "seconds and bytes; half of the dropouts before their values arrive, half before the sum is opened",
        ("clients", "dropouts", "side", "s per client", "s, server", "bytes up", "bytes down"),
        rows,
    )


def values_of(number: int) -> dict[str, np.ndarray]:
    """Random values of a client."""
    return {"x": np.random.default_rng(number).normal(size=VALUES)}


def lost_of(count: int, lost: float) -> tuple[set[int], set[int]]:
    """Who leaves before its values arrive, and who before the sum is opened; not the clients that are measured."""
    gone = round(lost * count)
    order = MEASURED + np.random.default_rng(0).permutation(count - MEASURED)
    return set(order[: gone // 2].tolist()), set(order[gone // 2 : gone].tolist())


class _Trusting(Identity):
    """One that takes all signatures as they are."""

    def signed_by(self, number: int, signature: bytes, message: bytes) -> bool:
        return True


def headstart(count: int, lost: float | None) -> dict[str, float]:
    """The protocol between state machines in this process."""
    early, late = lost_of(count, lost or 0.0)
    silent = {"masked": early, "reveal": late}
    threshold = count if lost is None else math.ceil(THRESHOLD * count)
    server = SecureSum(SESSION, range(count), threshold, {"x": (VALUES,)})
    sides = [Identity.derived(SESSION, number) for number in range(count)]
    peers = {number: side.private_key.public_key().public_bytes_raw() for number, side in enumerate(sides)}
    clients = []
    for number, side in enumerate(sides):
        one = replace(side, peers=peers) if number < MEASURED else _Trusting(number, side.private_key, peers)
        clients.append(SecureClient(SESSION, count, threshold, one, values_of(number)))
    seconds, up, down, on_server = np.zeros(count), np.zeros(count, int), np.zeros(count, int), 0.0
    while step := server.step:
        start = time.process_time()
        instructions = server.instructions()
        on_server += time.process_time() - start
        for number, told in instructions.items():
            down[number] += told.nbytes
            if number in silent.get(step, ()):
                continue
            client = clients[number]
            answers = {"shares": client.share, "masked": client.mask, "agree": client.agree, "reveal": client.reveal}
            start = time.process_time()
            answer = client.keys() if step == "keys" else answers[step](told)
            seconds[number] += time.process_time() - start
            up[number] += answer.nbytes
            start = time.process_time()
            server.receive(number, answer)
            on_server += time.process_time() - start
        server.next()
    start = time.process_time()
    total = np.asarray(server.total()["x"], float)
    on_server += time.process_time() - start
    np.testing.assert_allclose(total, sum(values_of(number)["x"] for number in server.survivors), atol=1e-9)
    measured = slice(0, MEASURED)
    return {
        "client": seconds[measured].mean(), "server": on_server,
        "up": round(up[measured].mean()), "down": round(down[measured].mean()),
    }  # fmt: skip


def flower(count: int, lost: float) -> dict[str, float]:
    """The work of one client, and of the server, composed of Flower's helpers as its SecAgg+ mod and workflow do.

    The same neighbours and thresholds. No signatures, no agreement on survivors. The server's time is that of a few
    secrets and masks, times how many there are.
    """
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen, share_keys_plaintext_concat
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes, public_key_to_bytes

    graph = Graph.of(b"", range(count), math.ceil(THRESHOLD * count))
    early, _ = lost_of(count, lost)
    group, others = graph.neighbours + 1, [generate_key_pairs() for _ in range(graph.neighbours)]
    start = time.process_time()
    pairs = [generate_key_pairs() for _ in range(2)]
    seed, secret = os.urandom(32), private_key_to_bytes(pairs[0][0])
    seed_shares, key_shares = (create_shares(each, graph.needed, group) for each in (seed, secret))
    masked, parts = quantize([values_of(0)["x"]], 8.0, 1 << 22)[0].astype(np.int64), []
    for place, (_, public) in enumerate(others):
        key = generate_shared_key(pairs[1][0], public)
        parts.append(encrypt(key, share_keys_plaintext_concat(0, place, seed_shares[place], key_shares[place])))
        decrypt(key, parts[-1])
    masked += pseudo_rand_gen(seed, 1 << 32, [(VALUES,)])[0]
    for _, public in others:
        masked += pseudo_rand_gen(generate_shared_key(pairs[0][0], public), 1 << 32, [(VALUES,)])[0]
    on_client = time.process_time() - start

    def one(work: Any) -> float:
        begun = time.process_time()
        for _ in range(SAMPLE):
            work()
        return (time.process_time() - begun) / SAMPLE

    seed_seconds = one(lambda: combine_shares(seed_shares[: graph.needed]))
    key_seconds = one(lambda: combine_shares(key_shares[: graph.needed])) if early else 0.0
    own = one(lambda: pseudo_rand_gen(seed, 1 << 32, [(VALUES,)]))
    pair = one(lambda: pseudo_rand_gen(generate_shared_key(pairs[0][0], others[0][1]), 1 << 32, [(VALUES,)]))
    alive = count - len(early)
    masks = len(early) * graph.neighbours * alive / count
    sent = sum(map(len, parts))
    keys, share = 2 * len(public_key_to_bytes(pairs[0][1])), alive / count * len(seed_shares[0])
    share += (1 - alive / count) * len(key_shares[0])
    return {
        "client": on_client,
        "server": alive * (seed_seconds + own) + len(early) * key_seconds + masks * pair,
        "up": round(keys + sent + masked.nbytes + group * share),
        "down": keys * group + sent,
    }


if __name__ == "__main__":
    side, count = sys.argv[1], int(sys.argv[2])
    share = None if sys.argv[3] == "None" else float(sys.argv[3])
    print(json.dumps(headstart(count, share) if side == "headstart" else flower(count, share or 0.0)))
