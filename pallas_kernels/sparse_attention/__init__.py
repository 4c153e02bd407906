"""Causal attention under fixed sparse patterns: local, strided, their union, and fixed blocks."""
