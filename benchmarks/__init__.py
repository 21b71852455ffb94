"""Benchmarks: each checks its answers before it prints a number. `python -m benchmarks` runs those that have goals."""
