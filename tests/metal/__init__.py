"""Proof of the Metal path without a Mac: export as Metal would, check, cross-compile, and run on the CPU."""
