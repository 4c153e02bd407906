"""What differs between JAX releases, in one place."""

from pallas_kernels._varying import vary_over, varying_axes

__all__ = ['vary_over', 'varying_axes']
