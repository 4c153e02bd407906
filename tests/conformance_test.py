"""What every projection and recipe must keep to on one device: dtypes, one compilation, accumulation, checkpoints."""

import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import sparse24_jax as s24
from tests.conformance import (
  assert_trees_equal,
  CASES,
  KINDS,
  make_step,
  NARROW,
  optimizer,
  OTHER_CASES,
  OTHERS_THAT_MOVE,
  phase_of,
  projection_of,
  run,
  TOKENS,
  UNSTRUCTURED,
  weights,
)
from tests.quick import jit

# One of each kind, and the ways in which decay joins gradients or weights.
FAST_DTYPES = (*KINDS, 'ste', 'sr_ste_on_weights', 'sr_ste_on_gradients', 's_ste', 'rigl')


def describe(tree):
  return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)


class OneDeviceTest(parameterized.TestCase):

  @parameterized.parameters(
    *((case, 'bfloat16') for case in (*FAST_DTYPES, *(case for case in CASES if case not in FAST_DTYPES))),
    *((case, 'float32') for case in CASES),
  )
  @pytest.mark.few(len(FAST_DTYPES))
  def test_dtypes_shapes_and_structure_stay(self, case, dtype):
    """Abstractly, for parameters of both dtypes, through init and a step of either phase."""
    recipe = CASES[case]
    params = jax.eval_shape(lambda: weights(dtype))
    for phase in {'dense', phase_of(recipe)}:
      tx = optimizer(recipe, phase)
      state = jax.eval_shape(tx.init, params)
      updates, after = jax.eval_shape(tx.update, params, state, params)
      self.assertEqual(describe(state), describe(after))
      self.assertEqual(describe(updates), describe(params))
      self.assertEqual({u.dtype for u in jax.tree.leaves(updates)}, {jnp.dtype(dtype)})
    x = jax.ShapeDtypeStruct((TOKENS, NARROW), dtype)
    stepped, after, _ = jax.eval_shape(make_step(recipe), params, state, x, jax.random.key(0))
    self.assertEqual((describe(stepped), describe(after)), (describe(params), describe(state)))

  # Optax's bias correction, which `step_adam` and `optax.adam` have, promotes the count of steps.
  @parameterized.parameters(*(case for case in (*KINDS, *OTHER_CASES) if case != 'step'))
  @pytest.mark.few(4)
  def test_runs_under_strict_promotion(self, case):
    recipe = CASES[case]
    tx = s24.sparse_training(optax.sgd(0.1), recipe, phase=phase_of(recipe), learning_rate=0.1)
    x = jax.ShapeDtypeStruct((TOKENS, NARROW), jnp.float32)
    with jax.numpy_dtype_promotion('strict'):
      params = jax.eval_shape(weights)
      jax.eval_shape(make_step(recipe, tx), params, jax.eval_shape(tx.init, params), x, jax.random.key(0))

  @parameterized.parameters(*KINDS)
  def test_trains_with_one_compilation(self, case):
    self.check_training(case)

  @parameterized.parameters(*OTHER_CASES)
  @pytest.mark.slow
  def test_other_cases_train_with_one_compilation(self, case):
    self.check_training(case)

  def check_training(self, case):
    record = run(case)
    self.assertLess(record.losses[-1], record.losses[0])
    self.assertEqual(record.compilations, 1)
    for state in record.states:
      self.assertEqual(describe(state), describe(record.states[0]))
    abstract = jax.eval_shape(optimizer(CASES[case]).init, jax.eval_shape(weights))
    self.assertEqual(
      jax.tree.map(lambda a: (a.shape, a.dtype), abstract), jax.tree.map(lambda a: (a.shape, a.dtype), record.states[0])
    )
    if phase_of(CASES[case]) == 'sparse' and case not in UNSTRUCTURED:
      for name, leaf in s24.project(record.params, record.states[-1], CASES[case], phase='sparse').items():
        s24.verify24(leaf['kernel'], axis=-2 if projection_of(case, name).divisor[0] == 4 else -1)

  @parameterized.parameters(*KINDS)
  @pytest.mark.few
  def test_accumulated_micro_batches_are_one_step(self, case):
    """Two halves of a gradient under MultiSteps give the state and the update of the whole."""
    self.check_accumulation(case)

  @parameterized.parameters(*OTHERS_THAT_MOVE)
  @pytest.mark.slow
  def test_accumulated_micro_batches_of_other_cases(self, case):
    self.check_accumulation(case)

  def check_accumulation(self, case):
    tx, params = optimizer(CASES[case]), weights()
    halves = weights(seed=1), weights(seed=2)
    multi = optax.MultiSteps(tx, every_k_schedule=2)

    @jit
    def both(params, a, b):
      state = multi.init(params)
      _, state = multi.update(a, state, params)
      between = state.inner_opt_state
      updates, state = multi.update(b, state, params)
      whole = jax.tree.map(lambda a, b: (a + b) / 2, a, b)
      return (updates, state.inner_opt_state), tx.update(whole, tx.init(params), params), between, tx.init(params)

    found, expected, between, start = both(params, *halves)
    assert_trees_equal(between, start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    self.assertEqual(int(found[1][1].count), 1)

  def test_checkpoint_round_trip(self):
    self.check_checkpoint(KINDS)

  @pytest.mark.slow
  def test_checkpoint_round_trip_of_other_cases(self):
    self.check_checkpoint(OTHER_CASES)

  def check_checkpoint(self, cases):
    saved = {case: {'params': run(case).params, 'state': run(case).states[-1]} for case in cases}
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/checkpoint', saved)
      checkpointer.wait_until_finished()
      abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), saved)
      loaded = checkpointer.restore(f'{folder}/checkpoint', abstract)
    self.assertEqual(jax.tree.structure(loaded), jax.tree.structure(saved))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(loaded), jax.tree.leaves(saved), strict=True):
      self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), path)
      self.assertEqual(np.asarray(a).tobytes(), np.asarray(b).tobytes(), path)

  @pytest.mark.slow
  def test_checkpoint_of_a_sharded_run_keeps_values_and_shardings(self):
    record = run('transposable_srste', 'fsdp')
    saved = {'params': record.params, 'state': record.states[-1]}
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/checkpoint', saved)
      checkpointer.wait_until_finished()
      abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), saved)
      loaded = checkpointer.restore(f'{folder}/checkpoint', abstract)
    assert_trees_equal(loaded, saved)
    jax.tree.map(lambda a, b: self.assertTrue(a.sharding.is_equivalent_to(b.sharding, a.ndim)), loaded, saved)


if __name__ == '__main__':
  absltest.main()
