import itertools
import pickle

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from sparse24_jax.projection import is_searched
from tests import oracles
from tests.quick import jit

PROJECTIONS = {
  'magnitude': s24.magnitude(),
  'magnitude_1_of_8': s24.magnitude(n=1, m=8),
  'transposable': s24.transposable(),
  'two_approx': s24.transposable(method='two_approx'),
  'soft_threshold': s24.soft_threshold_projection(),
}
W = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 8)), jnp.float32)
NEW = jnp.asarray(np.random.default_rng(1).standard_normal((2, 16, 8)), jnp.float32)


def expected_mask(name: str, w) -> np.ndarray:
  """What each projection keeps of one matrix."""
  if name == 'magnitude_1_of_8':
    return oracles.magnitude_mask(w, n=1, m=8)
  if name in ('transposable', 'two_approx'):
    best = oracles.PATTERNS[oracles.pattern_scores(w).argmax(1)]
    kept = best if name == 'transposable' else np.array([oracles.greedy_block(b) for b in oracles.blocks(w)])
    return kept.reshape(4, 2, 4, 4).swapaxes(1, 2).reshape(16, 8)
  return oracles.magnitude_mask(w)


class ProjectionTest(parameterized.TestCase):
  # Each projection once, and each dtype.
  @parameterized.parameters(
    *zip(PROJECTIONS, itertools.cycle(oracles.DTYPES), strict=False),
    *(
      (name, dtype) for i, name in enumerate(PROJECTIONS) for dtype in oracles.DTYPES
      if dtype != oracles.DTYPES[i % len(oracles.DTYPES)]
    ),
  )  # fmt: skip
  @pytest.mark.few(len(PROJECTIONS))
  def test_of_a_stack(self, name, dtype):
    projection, w = PROJECTIONS[name], np.asarray(W).astype(dtype)

    @jit
    def of_a_stack(w):
      state = projection.init(w)
      again = projection.apply(w, jax.vmap(projection.init)(w))
      return state, projection.apply(w, state), again, projection.mask(w, state)

    state, applied, again, mask = of_a_stack(w)
    kept = np.stack([expected_mask(name, layer) for layer in w])
    self.assertEqual((applied.shape, applied.dtype), (w.shape, w.dtype))
    if name == 'soft_threshold':
      beta = np.stack([oracles.soft_threshold_scale(layer) for layer in w])
      self.assertEqual((state.shape, state.dtype), ((2,), jnp.float32))
      np.testing.assert_allclose(state, beta, rtol=1e-5)
      exact = oracles.wide(oracles.soft_threshold(w).astype(dtype)) * beta[:, None, None]
      np.testing.assert_allclose(oracles.wide(applied), exact, rtol=1.1 * float(jnp.finfo(dtype).eps), atol=1e-7)
      np.testing.assert_array_equal(mask, oracles.soft_threshold(w) != 0)
      # The scale may be summed in another order.
      np.testing.assert_allclose(oracles.wide(again), oracles.wide(applied), rtol=2 * float(jnp.finfo(dtype).eps))
    else:
      self.assertEqual((state.shape, state.dtype), (w.shape, jnp.bool_))
      oracles.assert_same(applied, np.where(kept, w, np.zeros((), dtype)))
      np.testing.assert_array_equal(mask, kept)
      np.testing.assert_array_equal(again, applied)

  def test_soft_threshold_along_the_output(self):
    projection = s24.soft_threshold_projection(axis=-1)
    state, soft = projection.init(W), oracles.soft_threshold(W, axis=-1)
    beta = oracles.soft_threshold_scale(W, axis=-1)
    np.testing.assert_allclose(state, beta, rtol=1e-5)
    np.testing.assert_allclose(projection.apply(W, state), soft * beta[:, None, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(projection.mask(W, state), soft != 0)

  @parameterized.parameters(*PROJECTIONS)
  def test_state_changes_only_by_refresh(self, name):
    projection = PROJECTIONS[name]
    state, new_state = projection.init(W), projection.refresh(NEW, projection.init(W))
    if name == 'soft_threshold':  # frozen at initialisation, though it would be another now
      np.testing.assert_array_equal(new_state, state)
      self.assertTrue((projection.init(NEW) != state).all())
      np.testing.assert_array_equal(projection.mask(NEW, state), oracles.soft_threshold(NEW) != 0)
    else:
      np.testing.assert_array_equal(new_state, projection.init(NEW))
      self.assertTrue((new_state != state).any())
      # Between refreshes the values are followed, the mask is not.
      np.testing.assert_array_equal(projection.apply(NEW, state), jnp.where(state, NEW, 0.0))
      np.testing.assert_array_equal(projection.mask(NEW, state), state)
    self.assertEqual(jax.eval_shape(projection.init, W), jax.eval_shape(projection.refresh, W, state))

  @parameterized.parameters(*(name for name in PROJECTIONS if name != 'soft_threshold'))
  def test_a_refresh_does_not_hide_nan(self, name):
    projection = PROJECTIONS[name]
    rows, columns = projection.divisor
    old = projection.init(W)
    *lead, row, column = at = tuple(np.argwhere(np.asarray(old))[0])
    found = np.asarray(projection.refresh(NEW.at[at].set(jnp.nan), old))
    # The group of the NaN keeps its mask, in which the NaN is kept; all others are chosen anew.
    expected = np.array(projection.init(NEW))
    top, left = row // rows * rows, column // columns * columns
    group = (*lead, slice(top, top + rows), slice(left, left + columns))
    expected[group] = np.asarray(old)[group]
    np.testing.assert_array_equal(found, expected)
    self.assertTrue(found[at])

  @parameterized.parameters(*PROJECTIONS)
  def test_pattern_is_what_the_fields_promise(self, name):
    projection = PROJECTIONS[name]
    applied = projection.apply(W, projection.init(W))
    s24.verify24(applied)
    if projection.transposable:
      s24.verify24(applied, axis=-1)
    rows, columns = projection.divisor
    jax.eval_shape(projection.init, jnp.ones((rows, columns)))
    with self.assertRaises(ValueError):
      projection.init(jnp.ones((rows + rows // 2, columns)))

  def test_calls_that_ask_for_the_same_make_one_object(self):
    """They were two, so that a block was none, and one density was shared out twice."""
    self.assertIs(s24.transposable(method='exact'), s24.transposable())
    self.assertIs(s24.soft_threshold_projection(axis=-2), s24.soft_threshold_projection())
    drawn = s24.dynamic_sparse(density=0.25, seed=0, start='random')
    self.assertIs(drawn, s24.dynamic_sparse(0.25))
    self.assertIs(pickle.loads(pickle.dumps(drawn)), drawn)
    self.assertIsNot(s24.dynamic_sparse(0.25, seed=1), drawn)
    with self.assertRaisesRegex(ValueError, 'n=True is no number'):
      s24.magnitude(n=True)
    with self.assertRaisesRegex(TypeError, "magnitude: got an unexpected keyword argument 'k'"):
      s24.magnitude(k=2)

  def test_only_a_refresh_that_changes_the_state_is_a_search(self):
    found = {name: is_searched(projection, W.shape, W.dtype) for name, projection in PROJECTIONS.items()}
    self.assertEqual([name for name, searched in found.items() if not searched], ['soft_threshold'])
    own = s24.Projection('own', lambda w: w * 2, lambda w, _: w, lambda w, s: w, lambda w, _: w != 0)
    for refresh, searched in ((lambda w, s: w, True), (lambda w, s: jnp.roll(s, 1), True), (lambda w, s: s, False)):
      self.assertEqual(is_searched(own._replace(refresh=refresh), W.shape, W.dtype), searched)

  def test_names_tell_settings_apart(self):
    self.assertLen({projection.name for projection in PROJECTIONS.values()}, len(PROJECTIONS))
    self.assertEqual([p.transposable for p in PROJECTIONS.values()], [False, False, True, True, False])


if __name__ == '__main__':
  absltest.main()
