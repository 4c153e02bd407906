import dataclasses
import json

from absl.testing import absltest, parameterized

import sparse24_jax as s24

BUILT = {
  'dense': s24.recipes.dense(),
  'ste': s24.recipes.ste('a/.*'),
  'sr_ste': s24.recipes.sr_ste('a/.*', masked_decay=2e-4),
  'transposable_srste': s24.recipes.transposable_srste('a/.*', masked_decay=6e-5),
  's_ste': s24.recipes.s_ste('a/.*'),
  's_ste_fp8': s24.recipes.s_ste('a/.*', fp8=True),
  'step': s24.recipes.step('a/.*'),
}


class RecipesTest(parameterized.TestCase):
  def test_which_matmul_is_sparse(self):
    found = {}
    for name, recipe in BUILT.items():
      self.assertEqual(recipe.name, name)
      for rule in recipe.rules:
        policy = rule.policy
        self.assertEqual(rule.path, 'a/.*')
        found[name] = (policy.projection.name, policy.input_grad, policy.weight_grad, policy.precision)
    self.assertEqual(found, {
      'ste': ('magnitude 2:4', 'dense', 'dense', 'default'),
      'sr_ste': ('magnitude 2:4', 'dense', 'dense', 'default'),
      'transposable_srste': ('transposable exact', 'sparse', 'mvue', 'default'),
      's_ste': ('soft_threshold', 'dense', 'mvue', 'default'),
      's_ste_fp8': ('soft_threshold', 'dense', 'mvue', 'fp8'),
      'step': ('magnitude 2:4', 'dense', 'dense', 'default'),
    })  # fmt: skip

  def test_decay_refresh_and_phases(self):
    found = {
      name: (r.masked_decay, r.decay_on, r.refresh_every, [(p.name, round(p.fraction, 4)) for p in r.phases])
      for name, r in BUILT.items()
    }
    self.assertEqual(found, {
      'dense': (0.0, 'gradients', 1, [('dense', 1.0)]),
      'ste': (0.0, 'gradients', 1, [('sparse', 1.0)]),
      'sr_ste': (2e-4, 'weights', 1, [('sparse', 1.0)]),
      'transposable_srste': (6e-5, 'gradients', 40, [('sparse', 0.8333), ('dense', 0.1667)]),
      's_ste': (0.0, 'gradients', 1, [('sparse', 1.0)]),
      's_ste_fp8': (0.0, 'gradients', 1, [('sparse', 1.0)]),
      'step': (0.0, 'gradients', 1, [('dense', 0.25), ('sparse', 0.75)]),
    })  # fmt: skip
    self.assertLen(s24.recipes.transposable_srste('a', masked_decay=0.0, dense_fraction=0).phases, 1)

  def test_two_factors_are_two_recipes(self):
    one, other = (s24.recipes.sr_ste('a', masked_decay=decay) for decay in (1e-4, 2e-4))
    self.assertNotEqual(one.describe(), other.describe())
    self.assertEqual((one.masked_decay, other.masked_decay), (1e-4, 2e-4))

  def test_watching_a_dense_run(self):
    recipe = s24.recipes.dense('a', watch=s24.transposable(), refresh_every=5)
    self.assertEqual((recipe.rules[0].policy.projection.name, recipe.refresh_every), ('transposable exact', 5))


class DescribeTest(parameterized.TestCase):
  def test_is_plain_and_equal_for_equal_recipes(self):
    described = [json.dumps(recipe.describe()) for recipe in BUILT.values()]
    self.assertLen(set(described), len(BUILT))
    again = s24.recipes.transposable_srste('a/.*', masked_decay=6e-5).describe()
    self.assertEqual(again, BUILT['transposable_srste'].describe())

  @parameterized.parameters(
    {'refresh_every': 41}, {'masked_decay': 7e-5}, {'decay_on': 'weights'}, {'flip_rate': 'step'},
    {'phases': (s24.Phase('sparse', 1.0),)}, {'rules': BUILT['ste'].rules}, {'name': 'other'},
    {'rules': BUILT['transposable_srste'].rules * 2},
  )  # fmt: skip
  def test_tells_every_field(self, **change):
    recipe = BUILT['transposable_srste']
    self.assertNotEqual(dataclasses.replace(recipe, **change).describe(), recipe.describe())

  def test_schedules_are_known_by_their_values(self):
    def described(slope):
      return s24.recipes.sr_ste('a', masked_decay=lambda count: slope * count).describe()['masked_decay']

    self.assertEqual(described(1e-5), described(1e-5))
    self.assertNotEqual(described(1e-5), described(2e-5))


class DenseTwinTest(absltest.TestCase):
  def test_watches_the_same_weights_without_touching_them(self):
    recipe = BUILT['transposable_srste']
    twin = recipe.dense_twin()
    self.assertEqual((twin.rules, twin.refresh_every, twin.masked_decay), (recipe.rules, 40, 0.0))
    self.assertEqual({s24.phase_at(twin, step, 100) for step in range(100)}, {'dense'})


if __name__ == '__main__':
  absltest.main()
