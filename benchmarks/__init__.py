"""What headstart takes, beside others and beside the machine's limits."""

import headstart  # noqa: F401 (before torch, as it says how threads wait)
