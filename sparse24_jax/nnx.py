"""Layers for Flax nnx models."""

from sparse24_jax.integration.nnx_mlp import Sparse24MLP

__all__ = ['Sparse24MLP']
