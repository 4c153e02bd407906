"""Rounding to float8 with per-tensor scales, and the dense float8 matmul."""
