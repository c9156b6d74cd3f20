"""Memory of the process."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_LARGEST = 2**25
"""Bytes of the largest block that glibc can keep."""


@cache
def keep_freed_memory() -> None:
    """Let glibc keep the blocks of up to 32 MiB that are freed, for those that are asked for next.

    It returns them to the system otherwise, and every layer's activations are then pages that the system has to zero:
    up to half the time of a pass. Other C libraries have no such settings, or need none.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
