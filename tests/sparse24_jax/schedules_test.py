from absl.testing import absltest, parameterized
import jax.numpy as jnp

import sparse24_jax as s24

FST = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
STEP = s24.recipes.step('.*', dense_fraction=0.25)
TRIO = s24.Recipe(
  'trio', phases=(s24.Phase('dense', 0.1), s24.Phase('sparse', 0.8), s24.Phase('dense', 1 - 0.1 - 0.8))
)


class PhaseAtTest(parameterized.TestCase):
  @parameterized.parameters(
    (FST, 300_000, [(0, 'sparse'), (249_999, 'sparse'), (250_000, 'dense'), (299_999, 'dense')]),
    (FST, 6, [(4, 'sparse'), (5, 'dense')]),
    (FST, 1, [(0, 'sparse')]),
    (STEP, 1000, [(0, 'dense'), (249, 'dense'), (250, 'sparse'), (999, 'sparse')]),
    (STEP, 10, [(1, 'dense'), (2, 'sparse')]),  # 2.5 steps, rounded
    (TRIO, 1000, [(99, 'dense'), (100, 'sparse'), (899, 'sparse'), (900, 'dense'), (999, 'dense')]),
    (s24.recipes.dense(), 3, [(0, 'dense'), (2, 'dense')]),
    (s24.recipes.s_ste('.*'), 3, [(0, 'sparse'), (2, 'sparse')]),
  )
  def test_boundaries(self, recipe, total, expected):
    self.assertEqual([(step, s24.phase_at(recipe, step, total)) for step, _ in expected], expected)

  @parameterized.parameters(FST, STEP, TRIO)
  def test_each_phase_has_its_share_and_comes_once(self, recipe):
    for total in (100, 997, 2000):
      phases = [s24.phase_at(recipe, step, total) for step in range(total)]
      changes = [i for i in range(1, total) if phases[i] != phases[i - 1]]
      self.assertLen(changes, len(recipe.phases) - 1)
      lengths = [b - a for a, b in zip([0, *changes], [*changes, total], strict=True)]
      for length, phase in zip(lengths, recipe.phases, strict=True):
        self.assertAlmostEqual(length, phase.fraction * total, delta=1)
    self.assertIsInstance(phases[0], str)

  @parameterized.parameters(
    s24.recipes.mixed_sparsity('w', total_steps=40, refresh_every=2),
    s24.recipes.mixed_sparsity('w', total_steps=40, refresh_every=2, structure='2:4'),
    s24.recipes.rigl('w', density=0.2, total_steps=40, refresh_every=2),
    s24.bind(
      s24.recipes.rigl('w', density=0.2, total_steps=40, refresh_every=2),
      lambda p, x: x @ p['w'], {'w': jnp.ones((8, 8))}, jnp.ones((1, 8)),
    ),
  )  # fmt: skip
  def test_refuses_another_total_than_that_of_the_recipe(self, recipe):
    for at in (s24.phase_at, s24.attention_at):
      for other in (20, 80):
        with self.assertRaisesRegex(ValueError, rf"^total_steps={other}.*'{recipe.name}'.* for total_steps=40: .*new"):
          at(recipe, 3, other)
    s24.attention_at(recipe, 39, 40)
    self.assertEqual(s24.phase_at(recipe, 20, 40), 'sparse')


if __name__ == '__main__':
  absltest.main()
