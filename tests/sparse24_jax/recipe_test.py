import dataclasses
import inspect
import json
import pickle

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24

BUILT = {
  'dense': s24.recipes.dense(),
  'ste': s24.recipes.ste('a/.*'),
  'sr_ste': s24.recipes.sr_ste('a/.*', masked_decay=2e-4),
  'transposable_srste': s24.recipes.transposable_srste('a/.*', masked_decay=6e-5),
  'transposable_srste_fp8': s24.recipes.transposable_srste('a/.*', masked_decay=6e-5, fp8=True),
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
      'transposable_srste_fp8': ('transposable exact', 'sparse', 'mvue', 'fp8'),
      's_ste': ('soft_threshold', 'dense', 'mvue', 'default'),
      's_ste_fp8': ('soft_threshold', 'dense', 'mvue', 'fp8'),
      'step': ('magnitude 2:4', 'dense', 'dense', 'default'),
    })  # fmt: skip

  def test_whole_numbers_of_numpy(self):
    recipe = s24.recipes.transposable_srste('.*', masked_decay=2e-4, refresh_every=np.int64(40))
    self.assertEqual(json.loads(json.dumps(recipe.describe()))['refresh_every'], 40)

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
      'transposable_srste_fp8': (6e-5, 'gradients', 40, [('sparse', 0.8333), ('dense', 0.1667)]),
      's_ste': (0.0, 'gradients', 40, [('sparse', 1.0)]),
      's_ste_fp8': (0.0, 'gradients', 40, [('sparse', 1.0)]),
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


class DynamicSparseRecipesTest(parameterized.TestCase):
  BUILT = (
    ('mixed_sparsity', s24.recipes.mixed_sparsity('a/.*', total_steps=10_000), (0.25, 0.3, 'erdos_renyi', None)),
    ('mixed_sparsity_24', s24.recipes.mixed_sparsity('a/.*', total_steps=10_000, structure='2:4', density=0.1),
     (0.25, 0.3, 'erdos_renyi', '2:4')),
    ('mixed_sparsity_transposable',
     s24.recipes.mixed_sparsity('a/.*', total_steps=10_000, structure='transposable', density=0.1),
     (0.25, 0.3, 'erdos_renyi', 'transposable')),
    ('rigl', s24.recipes.rigl('a/.*', density=0.2, total_steps=10_000), (0.0, 0.3, 'erdos_renyi', None)),
    ('set_', s24.recipes.set_('a/.*', density=0.2), (1.0, 0.3, 'erdos_renyi', None)),
    ('static', s24.recipes.static('a/.*', density=0.2), (0.0, 0.0, 'erdos_renyi', None)),
  )  # fmt: skip

  @parameterized.parameters(*BUILT)
  def test_settings(self, name, recipe, settings):
    self.assertEqual((recipe.name, recipe.refresh_every, recipe.rules[0].path), (name, 100, 'a/.*'))
    policy = recipe.rules[0].policy
    topology = policy.projection.update
    drop = topology.drop_fraction(0) if callable(topology.drop_fraction) else topology.drop_fraction
    found = (topology.random_share, round(float(drop), 6), topology.distribution, topology.structure)
    input_grad = 'sparse' if policy.projection.transposable else 'dense'
    self.assertEqual((found, policy.input_grad, policy.weight_grad), (settings, input_grad, 'dense'))

  def test_rigl_rests_after_its_stop(self):
    default, half = (
      s24.recipes.rigl('a', density=0.2, total_steps=1000, **kwargs).rules[0].policy.projection.update.drop_fraction
      for kwargs in ({}, {'stop': 0.5})
    )
    np.testing.assert_allclose(default(np.array([0, 375, 750, 900])), [0.3, 0.15, 0, 0], atol=1e-6)
    np.testing.assert_allclose(half(np.array([0, 250, 500, 900])), [0.3, 0.15, 0, 0], atol=1e-6)

  def test_are_told_apart(self):
    others = [s24.recipes.rigl('a/.*', density=0.2, total_steps=steps) for steps in (10_000, 10_001)]
    others.append(s24.recipes.mixed_sparsity('a/.*', total_steps=10_000, density=0.1))
    described = [json.dumps(recipe.describe()) for recipe in [recipe for _, recipe, _ in self.BUILT] + others[1:]]
    self.assertLen(set(described), len(described))
    self.assertEqual(others[0].describe(), self.BUILT[3][1].describe())
    self.assertIs(others[0].rules[0].policy.projection, self.BUILT[3][1].rules[0].policy.projection)

  def test_stages_and_attention(self):
    pattern = s24.AttentionPattern('combined', 64)
    recipe = s24.recipes.mixed_sparsity(
      'a/.*', total_steps=1000, density=0.1, warm_up=0.2, restoration=0.3, attention=pattern
    )
    self.assertEqual([(p.name, round(p.fraction, 9)) for p in recipe.phases], [('sparse', f) for f in (0.2, 0.5, 0.3)])
    at = [s24.attention_at(recipe, step, 1000) for step in (199, 200, 699, 700)]
    self.assertEqual(at, [None, pattern, pattern, None])
    self.assertEqual(recipe.describe()['phases'][1][2:], [{'kind': 'combined', 'window': 64}])
    density = recipe.rules[0].policy.projection.update.density
    self.assertEqual([round(float(density(step)), 3) for step in (0, 200, 699, 700)], [1.0, 0.1, 0.1, 1.0])
    structured = s24.recipes.mixed_sparsity('a/.*', total_steps=1000, density=0.1, restoration=0.1, structure='2:4')
    self.assertEqual([p.name for p in structured.phases], ['dense', 'sparse', 'dense'])
    self.assertLen(s24.recipes.mixed_sparsity('a/.*', total_steps=1000, restoration=0.0).phases, 2)

  def test_attention_of_layers_and_heads(self):
    near, far = s24.AttentionPattern('local', 4), s24.AttentionPattern('strided', 4)
    each, other = (
      s24.recipes.mixed_sparsity('a/.*', total_steps=1000, restoration=0.1, attention=(None, heads))
      for heads in ((near, far), (far, near))
    )
    self.assertEqual(s24.attention_at(each, 500, 1000), (None, (near, far)))
    described = json.loads(json.dumps(each.describe()))['phases'][1][2]
    self.assertEqual(described, [None, [{'kind': 'local', 'window': 4}, {'kind': 'strided', 'window': 4}]])
    self.assertNotEqual(each.describe(), other.describe())

  @parameterized.parameters(
    (lambda: s24.recipes.mixed_sparsity('a', total_steps=1000, warm_up=0.6, restoration=0.4), 'sum below 1'),
    (lambda: s24.recipes.mixed_sparsity('a', total_steps=1000, restoration=0.05, refresh_every=60), 'shorter than'),
    (lambda: s24.recipes.mixed_sparsity('a', total_steps=10_000, structure='2:4', density=0.6), 'above the 0.5'),
    (lambda: s24.recipes.rigl('a', density=1.2, total_steps=1000), 'density'),
    (lambda: s24.recipes.rigl('a', density=0.2, total_steps=10, stop=0.0), 'stop'),
    # At the stop nothing moves any more: a first change at step 99 of 99 would be none.
    (lambda: s24.recipes.rigl('a', density=0.2, total_steps=132), r'rests from step 99 on.*refresh_every=100'),
    (lambda: s24.recipes.rigl('a', density=0.2, total_steps=132, refresh_every=99), 'rests from step 99 on'),
    (lambda: s24.Phase('sparse', 1.0, 'local'), 'AttentionPattern'),
    (lambda: s24.recipes.mixed_sparsity('a', total_steps=9000, warm_up_ramp='x'), "warm_up_ramp='x': known are"),
    (lambda: s24.recipes.mixed_sparsity('a', total_steps=9000, structure='2:4', restoration_ramp='x'), 'ion_ramp'),
    (lambda: s24.recipes.mixed_sparsity('(?i)a', total_steps=9000, mvue_path='b'), r"^path='\(\?i\)a'.*as \(\?i:"),
    (lambda: s24.recipes.mixed_sparsity('a', total_steps=9000, mvue_path='b)'), r"^mvue_path='b\)'.*unbalanced"),
  )
  def test_refuses(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()


class DescribeTest(parameterized.TestCase):
  def test_is_plain_and_equal_for_equal_recipes(self):
    described = [json.dumps(recipe.describe()) for recipe in BUILT.values()]
    self.assertLen(set(described), len(BUILT))
    again = s24.recipes.transposable_srste('a/.*', masked_decay=6e-5).describe()
    self.assertEqual(again, BUILT['transposable_srste'].describe())

  @parameterized.parameters(
    {'refresh_every': 41}, {'masked_decay': 7e-5}, {'decay_on': 'weights'}, {'flip_rate': 'step'},
    {'phases': (s24.Phase('sparse', 1.0),)}, {'rules': BUILT['ste'].rules}, {'name': 'other'},
    {'rules': BUILT['transposable_srste'].rules * 2}, {'freezes_second_moment': True},
  )  # fmt: skip
  def test_tells_every_field(self, **change):
    recipe = BUILT['transposable_srste']
    self.assertNotEqual(dataclasses.replace(recipe, **change).describe(), recipe.describe())

  def test_schedules_are_known_by_their_values(self):
    def described(slope):
      return s24.recipes.sr_ste('a', masked_decay=lambda count: slope * count).describe()['masked_decay']

    self.assertEqual(described(1e-5), described(1e-5))
    self.assertNotEqual(described(1e-5), described(2e-5))


class ReadableTest(absltest.TestCase):
  def test_a_recipe_is_a_line_of_what_is_not_as_by_default(self):
    self.assertEqual(
      repr(s24.recipes.s_ste('a|b', fp8=True)),
      "Recipe(name='s_ste_fp8', rules=(Rule(path='a|b', policy=DotPolicy(projection=<soft_threshold>,"
      " weight_grad='mvue', precision='fp8')),), refresh_every=40)",
    )
    bound = s24.bind(s24.recipes.ste('w'), lambda p, x: x @ p['w'].T, {'w': jnp.ones((8, 16))}, jnp.ones((4, 16)))
    self.assertEndsWith(repr(bound), 'weights=(1 weights, see check))')
    jax.jit(lambda decay: repr(s24.recipes.transposable_srste('w', masked_decay=decay)) and decay)(0.0)

  def test_an_unknown_argument_names_the_one_that_was_meant(self):
    with self.assertRaisesRegex(TypeError, r"transposable_srste\(\) has no argument 'mask_decay'; .*'masked_decay'\?"):
      s24.recipes.transposable_srste('.*', mask_decay=1e-4)
    with self.assertRaisesRegex(AttributeError, "no recipe 'fst': did you mean 'transposable_srste'"):
      _ = s24.recipes.fst
    with self.assertRaisesRegex(TypeError, r"ste\(\) has no argument 'x'. It takes path"):
      s24.recipes.ste('.*', x=1)
    self.assertIs(pickle.loads(pickle.dumps(s24.recipes.ste)), s24.recipes.ste)

  def test_a_missing_argument_is_told_in_the_words_of_the_docstring(self):
    with self.assertRaisesRegex(
      TypeError, r'transposable_srste\(\) needs masked_decay: the factor lambda .*2e-5 .* to 6e-3 .*`tune_masked_decay`'
    ):
      s24.recipes.transposable_srste('.*')
    with self.assertRaisesRegex(TypeError, r'rigl\(\) needs density: kept .*; and total_steps: optimizer steps'):
      s24.recipes.rigl('.*')
    with self.assertRaisesRegex(TypeError, r'ste\(\) needs path: regular expression'):
      s24.recipes.ste()
    with self.assertRaisesRegex(TypeError, 'positional argument'):
      s24.recipes.ste('.*', 'mlp')


class PickleTest(absltest.TestCase):
  def test_a_recipe_comes_back_equal(self):
    """Other processes get it so; programs compiled for it are then found again."""
    needed = {
      'path': 'a/.*', 'up': 'up', 'down': 'down', 'masked_decay': 1e-4,
      'policy': s24.ActivationPolicy(s24.VNM(64, 8), s24.VNM(64, 8), clusters=s24.Clusters(4)),
      'density': 0.3, 'total_steps': 9000,
      'watch': s24.magnitude(),
    }  # fmt: skip
    for name in s24.recipes.__all__:
      make = getattr(s24.recipes, name)
      recipe = make(**{key: needed[key] for key in needed.keys() & inspect.signature(make).parameters})
      found = pickle.loads(pickle.dumps(recipe))
      self.assertEqual((found, hash(found)), (recipe, hash(recipe)), name)

  def test_a_projection_of_named_functions(self):
    projection = s24.magnitude()._replace(name='own', init=abs, apply=max, refresh=pow, mask=divmod)
    self.assertEqual(pickle.loads(pickle.dumps(projection)), projection)


class DenseTwinTest(absltest.TestCase):
  def test_watches_the_same_weights_without_touching_them(self):
    recipe = BUILT['transposable_srste']
    twin = recipe.dense_twin()
    self.assertEqual((twin.rules, twin.refresh_every, twin.masked_decay), (recipe.rules, 40, 0.0))
    self.assertEqual({s24.phase_at(twin, step, 100) for step in range(100)}, {'dense'})


if __name__ == '__main__':
  absltest.main()
