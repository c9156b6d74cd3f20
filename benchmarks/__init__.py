"""What headstart takes, beside others and beside the machine's limits."""

import os

if "BENCHMARKS_PEER" not in os.environ:  # whose threads wait as they would, in an environment without headstart
    import headstart  # noqa: F401 (before torch, as it says how threads wait)
