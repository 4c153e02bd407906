"""The continuous 2:4 projection of S-STE and its frozen scale."""

from jax import Array
import jax.numpy as jnp

from pallas_kernels.two_of_four import prune
from sparse24_jax.numerics import check_no_nan


def soft_threshold(w: Array, *, axis: int = -2) -> Array:
  """S(w) = sign(w) max(|w| - t, 0), t the second smallest magnitude in each group of four along `axis`.

  Continuous in `w`, with at most two non-zeros a group; a group of equal magnitudes becomes zero. A NaN makes the
  first two entries of its group NaN, and is an error under `jax.experimental.checkify`.

  Args:
    w: any shape whose length along `axis` is a multiple of four; float32, bfloat16 or float16.
    axis: the grouped axis.

  Returns:
    Shape and dtype of `w`, not scaled.

  Raises:
    ValueError: `w` cannot be grouped.

  Source: Hu et al., "S-STE", arXiv 2409.09099, section 4.1, the soft-thresholding function.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> s24.soft_threshold(jnp.array([1.0, -4.0, 2.0, 3.0]), axis=-1).tolist()
  [0.0, -2.0, 0.0, 1.0]
  """
  check_no_nan(w, 'w')
  return prune.soft_threshold(jnp.asarray(w), axis=axis)


def soft_threshold_scale(w: Array, *, axis: int = -2) -> Array:
  """beta = <w, S(w)> / ||S(w)||^2, the scale that minimises ||w - beta S(w)||^2, one for each matrix.

  S-STE computes it once, at initialisation, and keeps it: recomputed during training it grows and the flip rate
  explodes. It does not depend on the size of `w`. A Gaussian matrix has 1.484, and so has one that S maps to zero, such
  as a layer's that starts at zero: nothing tells its own scale yet.

  Args:
    w: `[..., rows, columns]`; leading axes (layers, experts) have a scale each.
    axis: the grouped axis.

  Returns:
    float32, shape `w.shape[:-2]`.

  Raises:
    ValueError: `w` cannot be grouped.

  Source: arXiv 2409.09099, section 4.2, minimum mean squared error.

  >>> import jax, sparse24_jax as s24
  >>> round(float(s24.soft_threshold_scale(jax.random.normal(jax.random.key(0), (1024, 1024)))), 2)
  1.48
  """
  check_no_nan(w, 'w')
  return prune.soft_threshold_scale(jnp.asarray(w), axis=axis)
