"""Slow, obvious numpy versions of what the library computes, written from the definitions and in float64.

They share no code with the library: loops over groups, enumeration over patterns.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def bit_patterns(dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
  """Uniformly random bits read as `dtype`: zeros, subnormals, infinities and NaN all occur."""
  dtype = np.dtype(dtype)
  bits = np.random.default_rng(seed).integers(0, 2 ** (8 * dtype.itemsize), shape)
  return bits.astype(f'uint{8 * dtype.itemsize}').view(dtype)


def wide(x) -> np.ndarray:
  """float64, signalling NaN included."""
  with np.errstate(invalid='ignore'):
    return np.asarray(x).astype(np.float64)


def assert_same(found, expected) -> None:
  """Equal dtypes, shapes and numbers; -0.0 is not 0.0, and NaN is NaN whatever its payload."""
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
  found, expected = wide(found), wide(expected)
  np.testing.assert_array_equal(found, expected)
  numbers = ~np.isnan(expected)
  np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


def assert_close(found, expected, tolerance: float) -> None:
  """Relative Frobenius error of every leaf."""
  found, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected))
  for (path, a), (other_path, b) in zip(found, expected, strict=True):
    assert path == other_path, (path, other_path)
    right = wide(b).reshape(a.shape)
    error = np.linalg.norm(wide(a) - right) / np.linalg.norm(right)
    assert error <= tolerance, f'{jax.tree_util.keystr(path)}: {error}'


def groups_last(x, axis: int, size: int = 4) -> np.ndarray:
  """[..., groups, size] with `axis` moved last."""
  moved = np.moveaxis(np.asarray(x), axis, -1)
  return moved.reshape(*moved.shape[:-1], -1, size)


def groups_back(groups: np.ndarray, axis: int) -> np.ndarray:
  """Inverse of `groups_last`."""
  return np.moveaxis(groups.reshape(*groups.shape[:-2], -1), -1, axis)


def magnitude_mask(w, *, n: int = 2, m: int = 4, axis: int = -2) -> np.ndarray:
  """Python's sort of (-|x|, index), NaN left out."""
  groups = groups_last(wide(w), axis, m)
  kept = np.zeros(groups.shape, bool)
  for where in np.ndindex(groups.shape[:-1]):
    numbers = [(-abs(x), i) for i, x in enumerate(groups[where].tolist()) if not math.isnan(x)]
    for _, i in sorted(numbers)[:n]:
      kept[*where, i] = True
  return groups_back(kept, axis)


def soft_threshold(w, *, axis: int = -2) -> np.ndarray:
  """float64, of a finite array."""
  groups = groups_last(wide(w), axis)
  out = np.zeros_like(groups)
  for where in np.ndindex(groups.shape[:-1]):
    threshold = sorted(abs(groups[where]))[1]
    out[where] = np.sign(groups[where]) * np.maximum(abs(groups[where]) - threshold, 0)
  return groups_back(out, axis)


def soft_threshold_scale(w, *, axis: int = -2) -> np.ndarray:
  soft = soft_threshold(w, axis=axis)
  return (wide(w) * soft).sum((-2, -1)) / (soft * soft).sum((-2, -1))


def activation_and_slope(name: str, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """float64 activation at `a` and its derivative; 'gelu' is the tanh approximation."""
  if name == 'relu':
    return np.maximum(a, 0), (a > 0).astype(np.float64)
  if name == 'squared_relu':
    return np.maximum(a, 0) ** 2, 2 * np.maximum(a, 0)
  if name == 'silu':
    sigmoid = 1 / (1 + np.exp(-a))
    return a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
  if name == 'gelu_exact':
    share = np.vectorize(math.erfc)(-a / np.sqrt(2)) / 2
    return a * share, share + a * np.exp(-a * a / 2) / np.sqrt(2 * np.pi)
  tanh = np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))
  inner_slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * a**2)
  return a * (1 + tanh) / 2, (1 + tanh) / 2 + a * inner_slope * (1 - tanh**2) / 2


def _patterns() -> np.ndarray:
  """The 90 transposable patterns in the documented order of ties."""
  rows = [row for row in itertools.product((1, 0), repeat=4) if sum(row) == 2]
  found = [p for p in itertools.product(rows, repeat=4) if all(sum(column) == 2 for column in zip(*p, strict=True))]

  def place(pattern):
    counts = [x + y for x, y in zip(*pattern[:2], strict=True)]
    shared = [c for c in range(4) if counts[c] == 1]  # columns of which either half has one entry
    if not shared:
      return (3, counts[0] == 0) if counts[0] == counts[1] else (0, counts[0] == 0, counts[2] == 0)
    if len(shared) == 2:
      whole = next(c for c in range(4) if c not in shared)
      order = {(0, 1): 1, (2, 3): 2, (0, 2): 4, (1, 3): 5, (0, 3): 7, (1, 2): 8}[tuple(shared)]
      return order, counts[whole] == 0, pattern[0][shared[0]] == 0, pattern[2][shared[0]] == 0
    order = [(1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1)]
    return 6, order.index(pattern[0]), order.index(pattern[2])

  return np.array(sorted(found, key=place), bool)


PATTERNS = _patterns()


def random_transposable_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
  """bool, one of the 90 patterns drawn for every 4x4 block of the last two axes."""
  *lead, rows, columns = shape
  drawn = PATTERNS[rng.integers(90, size=(*lead, rows // 4, columns // 4))]
  return drawn.swapaxes(-3, -2).reshape(shape)


def blocks(w) -> np.ndarray:
  """[n, 4, 4] of a matrix."""
  w = np.asarray(w)
  return w.reshape(w.shape[0] // 4, 4, w.shape[1] // 4, 4).swapaxes(1, 2).reshape(-1, 4, 4)


def pattern_scores(w) -> np.ndarray:
  """float64 [blocks, 90]: the magnitude that each pattern keeps of each block."""
  return abs(wide(blocks(w))).reshape(-1, 16) @ PATTERNS.reshape(90, 16).T.astype(np.float64)


def greedy_block(block) -> np.ndarray:
  """By falling magnitude, ties in reading order, an entry is kept while its row and its column hold fewer than two."""
  kept = np.zeros((4, 4), bool)
  for i, j in sorted(np.ndindex(4, 4), key=lambda at: (-abs(float(block[at])), at)):
    if kept[i].sum() < 2 and kept[:, j].sum() < 2:
      kept[i, j] = True
  return kept


def mvue_inclusion(x) -> np.ndarray:
  """float64 probabilities that each entry of groups `[..., 4]` is kept."""
  a = abs(wide(x))
  out = np.zeros_like(a)
  for where in np.ndindex(a.shape[:-1]):
    group, total = a[where], a[where].sum()
    if group.max() > total - group.max():
      rest = total - group.max()
      out[where] = np.where(group == group.max(), 1.0, group / rest if rest > 0 else 0.0)
    elif total:
      out[where] = 2 * group / total
  return out


def drawn_twice_inclusion(x) -> np.ndarray:
  """The same where a first index is drawn with a / S and a second among the rest, of groups without zeros."""
  a = abs(wide(x))
  total, out = a.sum(-1), np.zeros_like(a)
  for i, j in itertools.permutations(range(4), 2):
    both = a[..., i] / total * a[..., j] / (total - a[..., i])
    out[..., i] += both
    out[..., j] += both
  return out


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
  """Philox4x32-10 in Python integers, from the paper's description."""
  (a, b, c, d), (k0, k1), word = counter, key, 2**32 - 1
  for _ in range(10):
    left, right = a * 0xD2511F53, c * 0xCD9E8D57
    a, b, c, d = (right >> 32) ^ b ^ k0, right & word, (left >> 32) ^ d ^ k1, left & word
    k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
  return a, b, c, d
