"""`check`, as a function and as a command."""

import contextlib
import io

from absl.testing import absltest
import jax
import jax.numpy as jnp
import optax

import sparse24_jax as s24
from sparse24_jax.__main__ import main
from tests.sparse24_jax.binding.functions import arguments, CASES


def example():
  return CASES['attention'].f, *arguments('attention')


def unreadable():
  return lambda p, x: x @ (2 * p['w']), {'w': jnp.ones((16, 8))}, jnp.ones((4, 16))


class CheckTest(absltest.TestCase):

  def test_the_zeros_and_the_gradient_are_measured(self):
    f, params, x = example()
    checked = s24.check(s24.recipes.ste('.*'), f, params, x)
    self.assertTrue(checked.ok)
    self.assertEqual([w.pruned for w in checked.weights], [0.5, 0.5])
    self.assertGreater(min(w.reached for w in checked.weights), 0.4)
    frozen = s24.check(s24.recipes.ste('.*'), lambda p, x: f(jax.lax.stop_gradient(p), x), params, x)
    self.assertFalse(frozen.ok)
    self.assertIn('no gradient reaches its pruned entries', str(frozen))

  def test_shapes_are_enough_for_the_axes(self):
    f, *given = example()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    checked = s24.check(s24.recipes.ste('query'), f, *shapes)
    self.assertEqual([w.weight.layout.describe() for w in checked.weights], ['in 0, out 1 2'])
    self.assertEqual((checked.dense, checked.weights[0].pruned), (('out',), None))

  def test_every_problem_is_listed(self):
    params = {'w': jnp.ones((16, 8)), 'v': jnp.ones((6, 8)), 'fine': jnp.ones((8, 8))}
    f = lambda p, x: (x @ (2 * p['w']) + x[:, :6] @ p['v']) @ p['fine']  # noqa: E731
    checked = s24.check(s24.recipes.ste('.*'), f, params, jnp.ones((4, 16)))
    self.assertFalse(checked.ok)
    self.assertEqual([w.problem is None for w in checked.weights], [True, False, False])
    self.assertRegex(str(checked), r'(?s)PROBLEM  v of shape .* length 6 along axis -2.*PROBLEM  w of shape.*mul at')

  def test_masks_are_those_of_the_weights_that_the_chain_leaves(self):
    f, params, x = example()
    recipe = s24.recipes.ste('.*')
    bound = s24.bind(recipe, f, params, x)
    right = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adam(0.5), bound))
    scaled_after = optax.chain(s24.sparse_training(optax.scale_by_adam(), bound), optax.scale(-0.5))
    self.assertTrue(s24.check(recipe, f, params, x, optimizer=right).ok)
    wrong = s24.check(recipe, f, params, x, optimizer=scaled_after)
    self.assertFalse(wrong.ok)
    self.assertRegex(str(wrong), 'query: .*% of its new mask is not that of the weight after the step')

  def test_command(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(main(['check', f'{__name__}:example', '--dense', 'out', '--recipe', 's_ste']), 0)
      self.assertEqual(main(['check', f'{__name__}:unreadable']), 1)
    self.assertRegex(out.getvalue(), r'(?s)query +16 x 2 x 8 +in 0, out 1 2 .*dense: out.*PROBLEM  w of shape')
    with self.assertRaises(SystemExit), contextlib.redirect_stderr(out):
      main(['check', 'no_such_module:example'])
    self.assertIn("'no_such_module:example' is no MODULE:FUNCTION", out.getvalue())


if __name__ == '__main__':
  absltest.main()
