"""What changes updates behind `sparse_training` is found before a run, at any rate; right chains are not told."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.optim import _chain, _left, try_chain

STE = s24.recipes.ste('mlp/.*')
UP = 'mlp/up'
RECIPES = {
  's_ste': s24.recipes.s_ste('mlp/.*', refresh_every=40),
  'transposable': s24.recipes.transposable_srste('mlp/.*', masked_decay=1e-4, refresh_every=40),
  'sr_ste': s24.recipes.sr_ste('mlp/.*', masked_decay=1e-2),
  'rigl': s24.recipes.rigl('mlp/.*', density=0.5, total_steps=2000, refresh_every=100),
}
DECAYED = dataclasses.replace(STE, masked_decay=1e-4)
USUAL = {
  'adafactor': lambda: optax.adafactor(1e-3),
  'prodigy': lambda: optax.contrib.prodigy(1e-3),
  'clip of each entry': lambda: optax.chain(optax.clip(1.0), optax.adamw(3e-4)),
  'lion': lambda: optax.lion(1e-4),
  'lamb': lambda: optax.lamb(1e-3),
  'muon': lambda: optax.contrib.muon(1e-3),
  'novograd': lambda: optax.novograd(1e-3),
  'rmsprop': lambda: optax.rmsprop(1e-3),
  'nadamw': lambda: optax.nadamw(3e-4),
  'adan': lambda: optax.adan(1e-3),
  'adabelief': lambda: optax.adabelief(1e-3),
  'adopt': lambda: optax.contrib.adopt(1e-3),
}
ONE_FACTOR = {
  'dog': lambda: optax.contrib.dog(1.0),
  'dowg': lambda: optax.contrib.dowg(1.0),
  'mechanize': lambda: optax.contrib.mechanize(optax.adamw(3e-4)),
}


def params_of(dtype=jnp.float32):
  """All zero: nothing is to depend on them."""
  return {'mlp': {'up': jnp.zeros((32, 48), dtype)}, 'head': jnp.zeros(8, dtype)}


def wrapped(inner, recipe=STE):
  return s24.sparse_training(inner, recipe, learning_rate=3e-4)


def changed_behind(optimizer, params):
  return try_chain(optimizer, params).changed


def clipped_in(optimizer, params):
  return try_chain(optimizer, params, decays=True).clipped


def warm(rate, steps=2000):
  return optax.linear_schedule(0.0, rate, steps)


class ChangedBehindTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('rate', lambda: (wrapped(optax.scale_by_adam()), optax.scale(-3e-4))),
    ('factor', lambda: (wrapped(optax.adamw(3e-4)), optax.scale(0.5))),
    ('warm_up', lambda: (wrapped(optax.adamw(3e-4)), optax.scale_by_schedule(warm(1.0)))),
    ('decay', lambda: (wrapped(optax.adam(3e-4)), optax.add_decayed_weights(-0.1 * 3e-4))),
    ('clip', lambda: (wrapped(optax.adam(3e-4)), optax.clip_by_global_norm(1e-3))),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_what_comes_behind_is_found(self, make):
    self.assertEqual(changed_behind(optax.chain(*make()), params_of()), {UP: 0})

  @parameterized.named_parameters(
    ('behind_a_warm_up', lambda: (wrapped(optax.adam(warm(3e-4))), optax.scale(0.5)), {10, 100}),
    ('cosine_behind', lambda: (wrapped(optax.adamw(3e-4)),
     optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10_000))), {100, 1000}),
  )  # fmt: skip
  @pytest.mark.few
  def test_what_shows_later_is_found_later(self, make, steps):
    found = changed_behind(optax.chain(*make()), params_of())
    self.assertIn(found[UP], steps)

  @parameterized.parameters(*RECIPES)
  @pytest.mark.few(1)
  def test_every_recipe(self, name):
    right = wrapped(optax.adamw(3e-4), RECIPES[name])
    self.assertEqual(changed_behind(right, params_of()), {})
    self.assertEqual(set(changed_behind(optax.chain(right, optax.scale(0.5)), params_of())), {UP})

  def test_bfloat16(self):
    wrong = optax.chain(wrapped(optax.adamw(3e-4)), optax.scale(0.5))
    self.assertEqual(set(changed_behind(wrong, params_of(jnp.bfloat16))), {UP})

  def test_one_weight_of_many(self):
    params = {f'h_{i}': jnp.ones((4, 4)) for i in range(9)}
    (unwatched,) = set(params) - set(_left.watched(list(params)))
    one = optax.masked(optax.scale(0.5), {path: path == unwatched for path in params})
    wrong = optax.chain(wrapped(optax.sgd(3e-4), s24.recipes.ste('.*')), one)
    self.assertEqual(changed_behind(wrong, params), {unwatched: 0})

  @parameterized.product(
    dtype=(jnp.float32, jnp.bfloat16),
    case=('clipped', 'micro_batches', 'groups', 'frozen', 'warm_up', 'large', 'sgd', 'finite'),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_no_false_alarm(self, case, dtype):
    groups = {'adam': optax.adamw(3e-4), 'frozen': optax.set_to_zero()}
    tx = {
      'clipped': lambda: optax.chain(optax.clip_by_global_norm(1.0), wrapped(optax.adamw(3e-4))),
      'micro_batches': lambda: optax.MultiSteps(wrapped(optax.adamw(3e-4)), 3).gradient_transformation(),
      'groups': lambda: wrapped(optax.multi_transform(groups, {'mlp': 'adam', 'head': 'frozen'})),
      'frozen': lambda: wrapped(optax.multi_transform(groups, {'mlp': 'frozen', 'head': 'adam'})),
      'warm_up': lambda: wrapped(optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(warm(-3e-4)))),
      'large': lambda: wrapped(optax.adamw(0.3)),
      'sgd': lambda: wrapped(optax.sgd(1e-3, momentum=0.9)),
      'finite': lambda: optax.apply_if_finite(wrapped(optax.adamw(3e-4)), 3),
    }[case]()
    self.assertEqual(changed_behind(tx, params_of(dtype)), {})

  @parameterized.parameters('adamw', 'sgd', 'bfloat16', 'micro_batches', 'schedule')
  @pytest.mark.few
  def test_decay_that_is_clipped_with_gradients_is_found(self, case):
    clip, recipe = optax.clip_by_global_norm(1.0), dataclasses.replace(STE, masked_decay=1e-4)
    inner = optax.sgd(1e-2) if case == 'sgd' else optax.adamw(3e-4)
    if case == 'schedule':
      recipe = dataclasses.replace(recipe, masked_decay=lambda step: 1e-4 * (step > 500))
    params, found = params_of(jnp.bfloat16 if case == 'bfloat16' else jnp.float32), []
    for tx in (wrapped(optax.chain(clip, inner), recipe), optax.chain(clip, wrapped(inner, recipe))):
      several = optax.MultiSteps(tx, 2).gradient_transformation()
      found.append(clipped_in(several if case == 'micro_batches' else tx, params))
    self.assertEqual(found, [UP, None])
    self.assertIsNone(clipped_in(wrapped(optax.chain(clip, inner)), params))  # without decay
    with mock.patch.object(_chain, '_clipped') as asked:
      try_chain(wrapped(optax.chain(clip, inner)), params)
    asked.assert_not_called()

  @parameterized.parameters('adamw', 'sgd', 'bfloat16', 'micro_batches')
  @pytest.mark.few
  def test_a_clip_in_front_of_links_that_come_and_go_is_found(self, case):
    clip, inner = optax.clip_by_global_norm(1.0), optax.sgd(1e-2) if case == 'sgd' else optax.adamw(3e-4)
    params, found = params_of(jnp.bfloat16 if case == 'bfloat16' else jnp.float32), []
    for tx in (optax.chain(clip, wrapped(inner, RECIPES['rigl'])), wrapped(optax.chain(clip, inner), RECIPES['rigl'])):
      several = optax.MultiSteps(tx, 2).gradient_transformation()
      found.append(try_chain(several if case == 'micro_batches' else tx, params, links=UP).in_front)
    self.assertEqual(found, [UP, None])

  @pytest.mark.slow
  def test_nothing_is_asked_in_a_dense_phase_nor_of_an_optimizer_that_skips_large_steps(self):
    recipe = s24.recipes.mixed_sparsity('mlp/.*', total_steps=2000, structure='2:4')
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    start = s24.sparse_training(clipped, recipe, phase='dense')
    skips = functools.partial(optax.skip_large_updates, max_squared_norm=1e6)
    skipping = optax.MultiSteps(wrapped(optax.adamw(3e-4), RECIPES['rigl']), 1, should_skip_update_fn=skips)
    for tx in (start, skipping.gradient_transformation()):
      self.assertIsNone(try_chain(tx, params_of(), links=UP).in_front)

  @parameterized.parameters(*USUAL)
  @pytest.mark.few
  def test_usual_chains_are_right(self, name):
    for recipe, asked in ((DECAYED, {'decays': True}), (RECIPES['rigl'], {'links': UP})):
      tried = try_chain(wrapped(USUAL[name](), recipe), params_of(), **asked)
      found = tried.changed, tried.still, tried.clipped, tried.in_front, tried.sparse
      self.assertEqual(found, ({}, [], None, None, [UP]))

  @parameterized.parameters(*ONE_FACTOR)
  @pytest.mark.slow
  def test_one_factor_for_all_updates_looks_like_a_clip(self, name):
    self.assertEqual(clipped_in(wrapped(ONE_FACTOR[name](), DECAYED), params_of()), UP)
    self.assertIsNone(try_chain(wrapped(ONE_FACTOR[name](), RECIPES['rigl']), params_of(), links=UP).in_front)

  def test_micro_batches_around_a_wrong_chain(self):
    tx = optax.MultiSteps(optax.chain(wrapped(optax.identity()), optax.scale(-3e-4)), 4)
    self.assertEqual(changed_behind(tx, params_of()), {UP: 0})
    message = 'no step in 3 updates: check it without optax.MultiSteps'
    with mock.patch.object(_chain, '_CALLS', 3), self.assertRaisesRegex(ValueError, message):
      changed_behind(tx, params_of())


if __name__ == '__main__':
  absltest.main()
