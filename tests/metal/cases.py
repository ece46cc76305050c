"""The cases of the package's own kernels: one line each."""

CASES = []
