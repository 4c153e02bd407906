"""A checkpoint from elsewhere that is whole: masks that are no masks of the recipe, and meta that no run writes."""

from pathlib import Path

from absl.testing import absltest, parameterized
import jax
import numpy as np
import optax

from experiments.runs import restored
from experiments.runs.checkpoint import Restored
import sparse24_jax as s24

META = {
  'step': 7, 'data_state': {}, 'spent': dict.fromkeys(('training', 'compiling', 'evaluation', 'checkpoints'), 0.0),
  'phase': 'sparse', 'window': [], 'latest_losses': [], 'skipped_in_a_row': 0, 'rolled_back': 0,
}  # fmt: skip
STEP = [2.5, 1.0, 1e-3, 0.0, [0.0], True]


class RestoredTest(parameterized.TestCase):
  def _checkpoint(self, recipe, mask=None, meta=META):
    params = {'up': {'kernel': np.random.default_rng(0).standard_normal((2, 8, 8), np.float32)}}
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    if mask is not None:
      state = state._replace(projections={'up': {'kernel': jax.numpy.asarray(mask(state.projections['up']['kernel']))}})
    restored.require_ours(Path('run/checkpoints'), Restored(params, (state,), meta, {}), recipe)

  @parameterized.parameters('ste', 'transposable_srste', 's_ste', 'dense')
  def test_what_a_run_writes_is_taken(self, name):
    kwargs = {'transposable_srste': {'masked_decay': 0.1}}.get(name, {})
    self._checkpoint(s24.recipes.dense() if name == 'dense' else getattr(s24.recipes, name)('up/.*', **kwargs))

  def test_a_group_of_three(self):
    def one_more(mask):
      mask = np.array(mask)
      mask[1, 4:8, 3] = [True, True, True, False]
      return mask

    with self.assertRaisesRegex(ValueError, r'checkpoints/7: .* up/kernel \(3 of four\)\. .*: take another'):
      self._checkpoint(s24.recipes.ste('up/.*'), one_more)

  def test_two_of_four_along_one_axis_alone(self):
    recipe = s24.recipes.transposable_srste('up/.*', masked_decay=0.1)
    rows = np.broadcast_to([[True], [True], [False], [False]] * 2, (2, 8, 8))
    with self.assertRaisesRegex(ValueError, r'up/kernel \(4 of four\)\. '):
      self._checkpoint(recipe, lambda _: rows)
    self._checkpoint(s24.recipes.ste('up/.*'), lambda _: rows)

  @parameterized.parameters(
    ('window', [STEP, STEP[:3]], r'window\[1\] has 3 entries, and must have 6'),
    ('window', [[*STEP[:4], 0.0, True]], r'window\[0\]\[4\] is 0.0, and must be a list'),
    ('window', [[*STEP[:5], 'yes']], r"window\[0\]\[5\] is 'yes', and must be true or false"),
  )
  def test_steps_that_are_not_logged_yet(self, field, value, message):
    self._checkpoint(s24.recipes.ste('up/.*'), meta=META | {field: [STEP, [float('nan'), *STEP[1:5], False]]})
    with self.assertRaisesRegex(ValueError, f'checkpoint run/checkpoints/7, its meta: {message}'):
      self._checkpoint(s24.recipes.ste('up/.*'), meta=META | {field: value})

  @parameterized.parameters(('window', 3, 'a list'), ('spent', {'training': 'x'}, 'a number'), ('phase', 1, 'text'))
  def test_meta(self, field, value, kind):
    with self.assertRaisesRegex(ValueError, f'checkpoint run/checkpoints/7, its meta: {field}.* must be {kind}'):
      self._checkpoint(s24.recipes.ste('up/.*'), meta=META | {field: value})


if __name__ == '__main__':
  absltest.main()
