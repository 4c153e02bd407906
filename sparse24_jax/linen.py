"""Layers for Flax linen models."""

from sparse24_jax.integration.linen_mlp import Sparse24MLP

__all__ = ['Sparse24MLP']
