"""A step of a dense phase is the step of dense training: the same matmuls, and hardly a byte more."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import optax

import sparse24_jax as s24
from sparse24_jax.optim import _left
from tests import quick

RECIPE = s24.recipes.transposable_srste('.*', masked_decay=1e-4, refresh_every=40)
LAYERS, D, TOKENS = 3, 256, 32
SHAPES = {'up': (D, 4 * D), 'down': (4 * D, D)}
PARAMS = {
  f'h_{i}': {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()} for i in range(LAYERS)
}


def model(params, x):
  for layer in params.values():
    up, down = (layer[name].astype(jnp.bfloat16) for name in ('up', 'down'))
    x = x + jax.nn.gelu(x @ up) @ down
  return x


def compiled(recipe):
  """The step of dense training, or without a mask search that of the recipe's dense phase; arguments are given away."""
  inner = optax.adamw(1e-3)
  tx = inner if recipe is None else s24.sparse_training(inner, recipe, phase='dense')
  tx = optax.chain(optax.clip_by_global_norm(1.0), tx)

  def step(params, opt_state, x):
    if recipe is None:
      f, told = model, {}
    else:
      dense = s24.sparsify(model, recipe, phase='dense')
      variables = s24.sparse_variables(params, opt_state, recipe, phase='dense')
      f, told = (lambda params, x: dense(params, variables, None, x)), {'refresh': False}
    grads = jax.grad(lambda params: jnp.sum(f(params, x).astype(jnp.float32) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params, **told)
    return optax.apply_updates(params, updates), opt_state

  x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16)
  step = quick.jit(step, donate_argnums=(0, 1))
  return step.lower(PARAMS, jax.eval_shape(tx.init, PARAMS), x).compile()


class DensePhaseTest(absltest.TestCase):

  def test_a_step_is_that_of_dense_training(self):
    with _left.watching(0):  # what it costs to look at a few weights, to know them again, does not grow with them
      dense, ours = compiled(None), compiled(RECIPE)
    dots = [sorted(line.split(' dot(')[0].split(' = ')[1] for line in made.as_text().splitlines() if ' dot(' in line)
            for made in (dense, ours)]  # fmt: skip
    self.assertLen(dots[0], 2 * 3 * LAYERS - 1)  # no gradient of the input
    self.assertEqual(*dots)
    masks = sum(w.size for w in jax.tree.leaves(PARAMS))
    # To read the masks would be more than this.
    found = [made.cost_analysis()['bytes accessed'] for made in (dense, ours)]
    self.assertBetween(found[1] - found[0], 0, 0.2 * masks)
    memory = [made.memory_analysis() for made in (dense, ours)]
    self.assertLess(abs(memory[1].temp_size_in_bytes - memory[0].temp_size_in_bytes), 0.01 * masks)
    # They stay where they are: all but the pointers to what is returned is overwritten in place.
    self.assertLess(memory[1].output_size_in_bytes - memory[1].alias_size_in_bytes, 0.01 * masks)
    self.assertGreaterEqual(memory[1].alias_size_in_bytes - memory[0].alias_size_in_bytes, masks)


if __name__ == '__main__':
  absltest.main()
