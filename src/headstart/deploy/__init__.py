"""A federation of real machines on Flower: its apps, its folder, and who may start what."""

import os

# Before Flower is imported: neither it nor Ray tells anybody of a run, unless the user has said otherwise.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
