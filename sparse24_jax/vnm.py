"""V:N:M sparsity for users: mask, open format, check."""

from jax import Array
import jax.numpy as jnp

from pallas_kernels.vnm import format as fmt
from pallas_kernels.vnm import reference
from pallas_kernels.vnm.format import CompressedVNM
from sparse24_jax.numerics import check_no_nan

__all__ = ['CompressedVNM', 'compress_vnm', 'decompress_vnm', 'verify_vnm', 'vnm_mask']


def vnm_mask(x: Array, *, v: int, n: int = 2, m: int) -> Array:
  """Keeps four columns of each `m`, the same for `v` neighbouring rows, and the `n` largest of these four in each row.

  Columns are ranked by the sum of magnitudes over the `v` rows, in float32, entries by magnitude; of equals the lower
  index stays. So `n` of each `m` entries remain, and a block of `v` rows needs only 4 / m of the other operand of a
  matmul. `m=4` is plain 2:4. A NaN is kept, and is an error under `jax.experimental.checkify`.

  Args:
    x: `[..., rows, columns]`, whole blocks of `v` x `m`; float32, bfloat16 or float16.
    v: rows of a block; the kernel takes 64, 128 and multiples of 128.
    n: 2, what sparse tensor cores take.
    m: columns of a block, from 4 to 256.

  Returns:
    bool, shape of `x`.

  Raises:
    ValueError: `x` has no whole blocks, or `n` is not 2.

  Source: Castro et al., "VENOM", arXiv 2310.02065, section 3 (the format). It searches all quadruples of columns; the
  ranking by sums of magnitudes is the cheaper rule that one pass can apply.

  >>> import jax, sparse24_jax as s24
  >>> from sparse24_jax.vnm import vnm_mask
  >>> mask = vnm_mask(jax.random.normal(jax.random.key(0), (64, 32)), v=64, m=8)
  >>> int(mask.sum()), int(mask.any(0).sum())
  (512, 16)
  """
  check_no_nan(x, 'x')
  return reference.vnm_mask(jnp.asarray(x), v=v, n=n, m=m)


def compress_vnm(x: Array, mask: Array, *, v: int, n: int = 2, m: int) -> CompressedVNM:
  """Stores the entries of `x` that `mask` keeps: values, which columns a block kept, two-bit positions among them.

  Args:
    x: `[..., rows, columns]`.
    mask: bool, shape of `x`, as `vnm_mask` makes it, or keeping less.
    v: rows of a block.
    n: 2.
    m: columns of a block.

  Returns:
    `CompressedVNM`; for 128:2:8 of bfloat16, 0.28 times the bytes of the dense array.

  Raises:
    ValueError: shapes or sizes do not fit.

  >>> import jax
  >>> from sparse24_jax.vnm import compress_vnm, vnm_mask
  >>> x = jax.random.normal(jax.random.key(0), (64, 32))
  >>> c = compress_vnm(x, vnm_mask(x, v=64, m=8), v=64, m=8)
  >>> c.values.shape, c.columns.shape
  ((64, 8), (1, 16))
  """
  return fmt.compress(x, mask, v=v, n=n, m=m)


def decompress_vnm(c: CompressedVNM) -> Array:
  """The dense array that `c` stands for; inverse of `compress_vnm`.

  Raises:
    ValueError: `c` is refused by `verify_vnm`. In a trace its metadata and columns are errors under
      `jax.experimental.checkify`.

  >>> import jax, jax.numpy as jnp
  >>> from sparse24_jax.vnm import compress_vnm, decompress_vnm, vnm_mask
  >>> x = jax.random.normal(jax.random.key(0), (64, 32))
  >>> mask = vnm_mask(x, v=64, m=8)
  >>> bool((decompress_vnm(compress_vnm(x, mask, v=64, m=8)) == jnp.where(mask, x, 0)).all())
  True
  """
  return fmt.decompress(c)


def verify_vnm(x: Array | CompressedVNM, *, v: int | None = None, n: int = 2, m: int | None = None) -> None:
  """Checks on the host that a concrete array is V:N:M; -0.0 counts as zero, NaN as non-zero.

  Args:
    x: `[..., rows, columns]`; no tracer. Or a `CompressedVNM` from elsewhere: that its metadata and columns fit its
      values and name what a block can keep.
    v: rows of a block; of a `CompressedVNM` it may be left out.
    n: entries that a row of a block may use, 2.
    m: columns of a block; likewise.

  Raises:
    ValueError: naming the first block that uses more than four columns, or the first row of a block with too many
      entries, or why `x` cannot be cut into blocks, or what of a `CompressedVNM` cannot be.

  >>> import jax.numpy as jnp
  >>> from sparse24_jax.vnm import verify_vnm
  >>> verify_vnm(jnp.eye(8), v=8, m=8)
  Traceback (most recent call last):
  ValueError: not 8:2:8: block (0, 0) uses more than 4 columns
  """
  fmt.verify(x, v=v, n=n, m=m)
