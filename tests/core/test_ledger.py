import subprocess
import sys

from headstart.core.ledger import Ledger, peak_memory


def test_totals_add_up_over_clients() -> None:
    ledger = Ledger.open(3)
    ledger.bytes_up[[0, 2]] += [5, 7]
    ledger.forward_passes += 2
    ledger.tick()
    totals = ledger.totals()
    assert (totals["bytes_up"], totals["bytes_down"], totals["forward_passes"]) == (12, 0, 6)
    assert totals["seconds"] >= 0


def test_peak_memory_is_this_process_own() -> None:
    ballast = bytearray(300 << 20)  # a large parent
    assert peak_memory() > len(ballast)
    code = "from headstart.core.ledger import peak_memory as p; a = p(); block = b'x' * (64 << 20); print(a, p())"
    before, after = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert before < 200 << 20
    assert after - before > 60 << 20
