"""Pruning, sampling and packing of sparse operands in one pass over memory."""
