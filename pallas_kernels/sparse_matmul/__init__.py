"""Matmul of a 2:4-sparse and a dense matrix."""
