"""The dense baseline: each way that XLA is asked for it against NumPy, and what is refused however fast it is."""

from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _tuning
from pallas_kernels.sparse_matmul import _predict, _prepared, mosaic_gpu

_BF16, _E4M3 = jnp.dtype('bfloat16'), jnp.dtype('float8_e4m3fn')


def _problem(m, n, k, dtype=_BF16, b_layout='nk', out_layout='mn'):
  return mosaic_gpu.Problem(m, n, k, dtype, dtype, _BF16, b_layout, out_layout)


class DenseTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(_prepared, 'gap_s', lambda p, iterations: 0.0))

  @parameterized.product(dtype=(_BF16, _E4M3), b_layout=('nk', 'kn'), out_layout=('mn', 'nm'))
  def test_every_way_is_the_matmul(self, dtype, b_layout, out_layout):
    p = _problem(24, 32, 40, dtype, b_layout, out_layout)
    rng = np.random.default_rng(0)
    # Sums of integers up to 256 are exact in bfloat16, however they are made.
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((24, 40), (32, 40)))
    d = a @ b.T
    ways = _prepared._dense_ways(p)
    self.assertLen(ways, 2 if dtype == _BF16 else 4)
    found = jax.jit(lambda a, b: [f(a, b) for f in ways.values()])(
      jnp.asarray(a, dtype), jnp.asarray(b if b_layout == 'nk' else b.T, dtype)
    )
    for each in found:
      self.assertEqual(each.dtype, _BF16)
      np.testing.assert_array_equal(np.asarray(each, np.float32), d if out_layout == 'mn' else d.T)

  def test_of_few_tokens_a_call_multiplies_with_weights_of_their_own(self):
    p = _problem(8, 3, 16, out_layout='nm')
    x = _prepared.inputs(p, jax.random.key(0))
    with (
      mock.patch.object(_prepared, '_UNCACHED_ENTRIES', 3 * 8 * 16), mock.patch.object(_predict, '_MUCH_TO_READ', 1),
    ):
      weights = _prepared.many(p, x.a_dense)
      self.assertLen({w.unsafe_buffer_pointer() for w in (*weights, x.a_dense)}, 4)
      found = jax.jit(_prepared.in_turn(p, _prepared._dense_ways(p)['swapped']))(weights, x.b)
      times = _prepared.timer(p)
      with mock.patch.object(_prepared, 'times_ms', lambda f, args, iterations: [6.0] * iterations):
        self.assertEqual(times(None, (), 2), [2.0, 2.0])
    expected = np.asarray(x.b, np.float64) @ np.asarray(x.a_dense, np.float64).T
    self.assertLen(found, 3)
    for each in found:
      np.testing.assert_allclose(np.asarray(each, np.float64), expected, rtol=1e-2, atol=1e-2)

  def _fastest(self, p, wrong):
    """The baseline where the way called 'swapped' is `wrong` of its result and ten times as fast."""
    ways = _prepared._dense_ways(p)
    right = ways['swapped']
    made = []

    def times(f, args, iterations):
      made.append(f(*args))
      return [0.1 if len(made) > 1 else 1.0] * iterations

    with (
      mock.patch.object(_prepared, '_dense_ways', lambda p: ways | {'swapped': lambda a, b: wrong(right(a, b))}),
      mock.patch.object(_prepared, 'times_ms', times),
      # The first that is timed is slow, so that 'swapped' wins wherever it takes part.
      mock.patch.object(_tuning, 'interleave', lambda runs, timer, **_: [timer(r.f, r.args, 1) for r in runs]),
    ):
      return _prepared.dense_candidate(p, _prepared.inputs(p, jax.random.key(1))).config

  @parameterized.parameters(
    (lambda d: d.T, 'swapped is off by 1.4'),
    (lambda d: d * jnp.bfloat16(1.01), 'swapped is off by 7.*e-03, more than 4e-03'),
    (lambda d: d.astype(jnp.float32), r'swapped gives float32 \(64, 64\), not bfloat16 \(64, 64\)'),
    (lambda d: d[:32], r'swapped gives bfloat16 \(32, 64\), not bfloat16 \(64, 64\)'),
  )
  def test_a_wrong_way_is_refused_however_fast(self, wrong, reason):
    # Square, so that a transposed result has the right shape.
    with self.assertLogs(level='WARNING') as logs:
      self.assertEqual(self._fastest(_problem(64, 64, 128), wrong), {'way': 'plain'})
    self.assertLen(logs.records, 1)
    self.assertRegex(logs.output[0], reason)

  def test_the_fastest_of_the_right_ways_is_taken(self):
    with self.assertNoLogs(level='WARNING'):
      self.assertEqual(self._fastest(_problem(64, 64, 128), lambda d: d), {'way': 'swapped'})

  def test_without_a_right_way_there_is_no_baseline(self):
    p = _problem(64, 64, 128)
    ways = {name: lambda a, b: (b @ a.T) for name in _prepared._dense_ways(p)}
    with (
      mock.patch.object(_prepared, '_dense_ways', lambda p: ways), self.assertLogs(level='WARNING'),
      self.assertRaisesRegex(ValueError, 'no dense way is right: plain is off by .*; swapped is off by'),
    ):
      _prepared.dense_candidate(p, _prepared.inputs(p, jax.random.key(1)))

  @parameterized.parameters((_BF16, 1.006, False), (_E4M3, 1.006, True), (_E4M3, 1.012, False))
  def test_8_bits_may_be_off_by_twice_as_much(self, dtype, factor, accepted):
    p = _problem(64, 64, 128, dtype)
    expected = jnp.linspace(-3.0, 3.0, 64 * 64).reshape(64, 64)
    dense = _tuning.Candidate('dense', None, lambda: (expected * factor).astype(_BF16), ())
    self.assertEqual(_prepared._refusal(p, dense, expected) is None, accepted)


if __name__ == '__main__':
  absltest.main()
