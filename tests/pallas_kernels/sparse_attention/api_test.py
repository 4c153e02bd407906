"""Sparse attention: every back end against a float64 loop, gradients against the masked form, and the work it saves."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from pallas_kernels import _device
from pallas_kernels.sparse_attention import blocks, cudnn, reference
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention
from pallas_kernels.sparse_attention.patterns import heads_of, KINDS

MIXED = (Pattern('local', 4), Pattern('fixed', 4), Pattern('strided', 3), Pattern('full'))


def attends(pattern, query, key):
  """By the words of the definition, for one pair."""
  c = pattern.window
  if key > query:
    return False
  local, strided = query - key < c, (query - key) % c == 0
  fixed = query // c == key // c or key % c == c - 1
  return {'full': True, 'local': local, 'strided': strided, 'combined': local or strided, 'fixed': fixed}[pattern.kind]


def oracle(q, k, v, patterns, scale):
  """Loops over queries and their attended keys, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  y = np.zeros_like(q)
  shared = q.shape[2] // k.shape[2]
  for b, i, h in np.ndindex(q.shape[:3]):
    keys = [j for j in range(q.shape[1]) if attends(patterns[h], i, j)]
    weight = np.exp(scale * (k[b, keys, h // shared] @ q[b, i, h]))
    y[b, i, h] = weight @ v[b, keys, h // shared] / weight.sum()
  return y


def inputs(batch=2, length=16, heads=4, groups=2, size=8, dtype=jnp.float32):
  rng = np.random.default_rng(length + heads)
  shapes = [(batch, length, n, size) for n in (heads, groups, groups, heads)]
  return [jnp.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes]


# Operation by operation each would be compiled.
attend = jax.jit(sparse_attention, static_argnames=('patterns', 'scale', 'implementation'))


class SparseAttentionTest(parameterized.TestCase):
  # One query; windows of one, that divide the length, that do not, and beyond it.
  @parameterized.product(kind=KINDS, size=((1, 1), (1, 13), (4, 16), (3, 1), (3, 16), (40, 13)))
  @pytest.mark.few(4)
  def test_blocks_and_reference_equal_the_loop(self, kind, size):
    window, length = size
    q, k, v, _ = inputs(length=length)
    pattern = Pattern(kind, window)
    expected = oracle(q, k, v, (pattern,) * 4, 8**-0.5)
    for name in ('reference', 'blocks'):
      found = attend(q, k, v, patterns=pattern, implementation=name)
      np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=name)

  @parameterized.parameters(
    (MIXED, 4), (MIXED, 2), (MIXED, 1), ((Pattern('local', 2),) * 2 + (Pattern('fixed', 8),) * 2, 2)
  )
  @pytest.mark.slow
  def test_a_pattern_a_head_with_shared_keys(self, patterns, groups):
    q, k, v, _ = inputs(groups=groups, length=17)
    expected = oracle(q, k, v, patterns, 0.3)
    for name in ('reference', 'blocks', None):
      found = attend(q, k, v, patterns=patterns, scale=0.3, implementation=name)
      np.testing.assert_allclose(found, expected, atol=2e-6)

  @parameterized.product(kind=KINDS, length=(16, 22))
  @pytest.mark.few(2)
  def test_gradients_are_those_of_the_masked_form(self, kind, length):
    q, k, v, dy = inputs(length=length)
    grads = []
    for name in ('reference', 'blocks'):
      f = functools.partial(sparse_attention, patterns=Pattern(kind, 4), implementation=name)
      grads.append(jax.jit(lambda q, k, v, dy, f=f: jax.vjp(f, q, k, v)[1](dy))(q, k, v, dy))
    for expected, found in zip(*grads, strict=True):
      self.assertTrue(np.isfinite(found).all())
      np.testing.assert_allclose(found, expected, atol=5e-6)

  @parameterized.parameters(Pattern('combined', 4), [(Pattern('fixed', 4), Pattern('local', 3)) * 2])
  @pytest.mark.slow
  def test_on_a_mesh_of_explicit_axes(self, patterns):
    """Heads of one pattern stay divided, those of several are gathered and divided again."""
    args = inputs(length=18)
    mesh = jax.make_mesh((2, 2), ('d', 't'), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec('d', None, 't', None))

    @jax.jit
    def step(q, k, v, dy):
      y, vjp = jax.vjp(lambda *x: sparse_attention(*x, patterns=patterns), q, k, v)
      return y, *vjp(dy)

    for x, expected in zip(step(*(jax.device_put(x, sharding) for x in args)), step(*args), strict=True):
      np.testing.assert_allclose(x, expected, atol=5e-6)
      self.assertTrue(x.sharding.is_equivalent_to(sharding, 4))

  @parameterized.parameters('local', 'strided')
  def test_what_cudnn_is_given_means_the_pattern(self, kind):
    """The same calls with XLA's implementation in cuDNN's place."""
    q, k, v, _ = inputs(length=22)
    found = jax.jit(lambda *x: cudnn.attend(Pattern(kind, 4), *x, 0.3, 'xla'))(q, k, v)
    np.testing.assert_allclose(found, oracle(q, k, v, (Pattern(kind, 4),) * 4, 0.3), atol=2e-6)

  def test_another_implementation_serves_what_cudnn_refuses(self):
    """On a GPU of the right generation whose cuDNN cannot be had, or will not take these shapes."""
    q, k, v, _ = inputs(length=64, dtype=jnp.bfloat16)
    calls = functools.partial(sparse_attention, q, k, v, patterns=Pattern('local', 16))
    expected = jax.jit(functools.partial(calls, implementation='blocks'))()
    with mock.patch.object(_device, 'current', lambda: _device.Device('gpu', 'gpu', (9, 0), 132)):
      with self.assertRaisesRegex(ValueError, r"cuDNN refuses Pattern\(kind='local', window=16\): \w+"):
        calls(implementation='cudnn')
      found = jax.jit(calls)()
    np.testing.assert_array_equal(found, expected)

  @parameterized.parameters('local', 'combined', 'fixed')
  @pytest.mark.few
  def test_bfloat16(self, kind):
    q, k, v, _ = inputs(length=64, dtype=jnp.bfloat16)
    found = jax.jit(lambda *x: sparse_attention(*x, patterns=Pattern(kind, 16)))(q, k, v)
    self.assertEqual(found.dtype, jnp.bfloat16)
    expected = oracle(*(x.astype(jnp.float32) for x in (q, k, v)), (Pattern(kind, 16),) * 4, 8**-0.5)
    error = np.linalg.norm(found.astype(jnp.float32) - expected) / np.linalg.norm(expected)
    self.assertLess(error, 6e-3)  # weights and result are rounded to 8 bits

  @parameterized.parameters('local', 'strided', 'combined', 'fixed')
  @pytest.mark.few(2)
  def test_skips_work(self, kind):
    q, k, v, dy = inputs(length=512, heads=2, groups=2, size=64)
    pattern = Pattern(kind, 32)

    def flops(module):
      def f(q, k, v, dy):
        y, vjp = jax.vjp(lambda *x: module.sparse_attention(*x, patterns=(pattern,) * 2, scale=1.0), q, k, v)
        return y, vjp(dy)

      return jax.jit(f).lower(q, k, v, dy).compile().cost_analysis()['flops']

    share = pattern.computed(512) / 512**2
    self.assertLess(share, 0.16)
    self.assertLess(flops(blocks), (share + 0.04) * flops(reference))

  def test_computed_covers_what_is_attended(self):
    for kind in KINDS:
      for length in (1, 100, 512):
        pattern = Pattern(kind, 32)
        self.assertGreaterEqual(pattern.computed(length), pattern.mask(length).sum())


class RefusalsTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(patterns=(Pattern('local'),) * 3), '3 entries; accepted are one pattern or one for each of 4 heads'),
    (dict(patterns='local'), '5 entries'),
    (dict(patterns=7), 'holds 7'),
    (dict(k=(2, 15, 2, 8)), r'found \(2, 15, 2, 8\)'),
    (dict(k=(2, 16, 3, 8), v=(2, 16, 3, 8)), '3 heads on axis 2; accepted is a divisor of the 4'),
    (dict(q=(16, 4, 8)), r'q must be \[batch'),
    (dict(implementation='cudnn'), 'compute capability 8.0'),
    (dict(implementation='flash'), "'flash' is unknown"),
  )  # fmt: skip
  def test_bad_calls(self, changes, message):
    arguments = dict(q=(2, 16, 4, 8), k=(2, 16, 2, 8), v=(2, 16, 2, 8), patterns=Pattern('local', 4)) | changes
    arrays = {name: jnp.ones(arguments.pop(name)) for name in 'qkv'}
    with self.assertRaisesRegex(ValueError, message):
      sparse_attention(**arrays, **arguments)

  def test_dtypes(self):
    x = jnp.ones((1, 4, 1, 8))
    with self.assertRaisesRegex(ValueError, 'v is bfloat16'):
      sparse_attention(x, x, x.astype(jnp.bfloat16), patterns=Pattern('local'))

  def test_bad_patterns(self):
    with self.assertRaisesRegex(ValueError, "kind='global'"):
      Pattern('global')
    with self.assertRaisesRegex(ValueError, 'window=0'):
      Pattern('local', 0)

  def test_anything_with_the_fields_is_a_pattern(self):
    class Other:
      kind, window = 'fixed', 5

    self.assertEqual(heads_of(Other(), 2), (Pattern('fixed', 5),) * 2)


if __name__ == '__main__':
  absltest.main()
