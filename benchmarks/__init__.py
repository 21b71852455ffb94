"""Benchmarks: each checks its answer before it prints a number. `make bench` runs them all."""
