"""Which weights are kept: N:M and transposable masks, compression, verification."""

from typing import Literal

from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.formats import Compressed24
from pallas_kernels.two_of_four import prune, transposable
from sparse24_jax.numerics import check_no_nan

__all__ = ['Compressed24', 'compress', 'decompress', 'magnitude_mask', 'transposable_mask', 'verify24']


def magnitude_mask(w: Array, *, n: int = 2, m: int = 4, axis: int = -2) -> Array:
  """N:M mask: True for the `n` largest magnitudes in each group of `m` along `axis`.

  Ties go to the lower index; -0.0 equals 0.0; infinities are the largest. A NaN is never kept, and is an error under
  `jax.experimental.checkify`.

  Args:
    w: any shape whose length along `axis` is a multiple of `m`; float32, bfloat16 or float16.
    n: entries kept in a group, 1 to `m`.
    m: entries in a group.
    axis: the grouped axis, the contracted one of the forward matmul; -2 for Flax kernels `[in, out]`.

  Returns:
    bool, shape of `w`.

  Raises:
    ValueError: `w` cannot be grouped, or `n` is out of range.

  Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", arXiv 2104.08378; ranking by magnitude as in
  SR-STE, arXiv 2102.04010, section 3.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> s24.magnitude_mask(jnp.array([1.0, -3.0, 2.0, 0.5]), axis=-1).tolist()
  [False, True, True, False]
  """
  check_no_nan(w, 'w')
  return prune.magnitude_mask(jnp.asarray(w), n=n, m=m, axis=axis)


def transposable_mask(w: Array, *, method: Literal['exact', 'two_approx'] = 'exact') -> Array:
  """2:4 mask along rows and columns at once: each 4x4 block keeps two entries of each row and of each column.

  One such mask serves the forward and, transposed, the input gradient. `exact` maximises the sum of kept magnitudes
  over the 90 such patterns, and always keeps 8 of 16 (less only where a NaN leaves no choice: a NaN is never kept).
  Among equal sums the first in the order of `pallas_kernels.two_of_four.transposable.PATTERNS` wins. `two_approx`
  keeps entries greedily by falling magnitude while row and column have room: at least half of the optimum, sometimes
  7 of 16; it is here to compare with.

  Args:
    w: `[..., rows, columns]`, both multiples of four; float32, bfloat16 or float16. Sums are taken in float32,
      where magnitudes below 2^-126 may count as zero and those beyond 2^120 as equal.
    method: `'exact'` or `'two_approx'`.

  Returns:
    bool, shape of `w`.

  Raises:
    ValueError: a side is not a multiple of four, or the method is unknown.

  Source: Hubara et al., arXiv 2102.08124, section 3 (the problem, the 2-approximation); Hu et al., arXiv 2404.01847,
  section 5.1 (90 patterns).

  >>> import jax, sparse24_jax as s24
  >>> mask = s24.transposable_mask(jax.random.normal(jax.random.key(0), (4, 4)))
  >>> mask.sum(0).tolist(), mask.sum(1).tolist()
  ([2, 2, 2, 2], [2, 2, 2, 2])
  """
  methods = {'exact': transposable.transposable_mask, 'two_approx': transposable.two_approximation_mask}
  if method not in methods:
    raise ValueError(f'method={method!r}: known are {sorted(methods)}')
  check_no_nan(w, 'w')
  return methods[method](jnp.asarray(w))


def compress(w: Array, mask: Array, *, axis: int = -2) -> Compressed24:
  """Stores the entries of `w` that `mask` keeps, two of each four along `axis`, with their positions.

  Args:
    w: any shape whose length along `axis` is a multiple of four; any real dtype.
    mask: bool, shape of `w`, at most two True a group. A group with fewer is filled with zeros.
    axis: the axis to compress.

  Returns:
    `Compressed24`: values (half as long along `axis`) and uint8 metadata (a nibble a group); 9/16 of the bytes of a
    bfloat16 array.

  Raises:
    ValueError: `mask` does not fit `w`, or `w` cannot be grouped. More than two True in a group is an error under
      `jax.experimental.checkify`; elsewhere the first two are stored.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> w = jax.random.normal(jax.random.key(0), (8, 4))
  >>> mask = s24.magnitude_mask(w)
  >>> bool((s24.decompress(s24.compress(w, mask)) == jnp.where(mask, w, 0)).all())
  True
  """
  return formats.compress(w, mask, axis=axis)


def decompress(c: Compressed24) -> Array:
  """The dense array that `c` stands for, of shape `c.shape` and dtype `c.dtype`; inverse of `compress`.

  Raises:
    ValueError: `c` is refused by `verify24`. In a trace its metadata are an error under `jax.experimental.checkify`.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> s24.decompress(s24.compress(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([True, False, False, True]), axis=-1))
  Array([1., 0., 0., 4.], dtype=float32)
  """
  return formats.decompress(c)


def verify24(w: Array | Compressed24, *, axis: int = -2) -> None:
  """Checks on the host that a concrete array is 2:4 along `axis`; -0.0 counts as zero, NaN as non-zero.

  Args:
    w: any shape and floating dtype; no tracer. Or a `Compressed24` from elsewhere: that its metadata fit its values and
      name two positions a group.
    axis: whose length holds the groups of four; a `Compressed24` has its own.

  Raises:
    ValueError: naming the first group with more than two non-zeros and its entries, or why `w` cannot be grouped, or
      the first byte of metadata that cannot be.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> s24.verify24(jnp.array([0.0, 5.0, -0.0, 7.0]), axis=-1)
  >>> s24.verify24(jnp.array([1.0, 5.0, 0.0, 7.0]), axis=-1)
  Traceback (most recent call last):
  ValueError: not 2:4 along axis -1: group (0,) holds [1.0, 5.0, 0.0, 7.0]
  """
  formats.verify(w, axis=axis)
