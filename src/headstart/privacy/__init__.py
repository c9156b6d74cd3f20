"""Noise on statistics, secure sums, accounting."""
