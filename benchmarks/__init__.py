"""Benchmarks and the files they run on. Run each with ``python -m benchmarks.NAME --help``."""
