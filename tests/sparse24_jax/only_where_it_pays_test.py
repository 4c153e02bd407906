"""Recipes without the layers that do not pay: which are left out, and that what comes back trains."""

import dataclasses
import sys
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.rules import match_rules
from tests.draws import gaussian, parameters
from tests.quick import jit

H100 = 'nvidia_h100_80gb_hbm3'
ALL = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
FST = s24.recipes.transposable_srste('.*/mlp/.*', masked_decay=1e-4)


def kernel(*shape) -> Any:
  return {'kernel': jax.ShapeDtypeStruct(shape, 'float32')}


def model_of(*widths, gated=False):
  """Shapes of a model of one feed-forward block a width."""
  names = ('gate', 'up') if gated else ('up',)
  return {
    f'h_{d}': {'mlp': {name: kernel(d, 4 * d) for name in names} | {'down': kernel(4 * d, d)}, 'norm': {'scale': 1.0}}
    for d in widths
  }


def recipe_of_all(recipe):
  """With its rule for every path."""
  return dataclasses.replace(recipe, rules=(dataclasses.replace(recipe.rules[0], path='.*'),))


class Blocks(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x + s24.linen.Sparse24MLP(128, name='first')(x)
    return x + s24.linen.Sparse24MLP(128, name='second')(x)


class OnlyWhereItPaysTest(parameterized.TestCase):

  def test_blocks_with_sparse_activations_choose_for_themselves(self):
    """Priced as two layers they would gain half of what the block does: `where_it_pays` refuses them by name."""
    params, recipe = model_of(256), s24.recipes.neuron_level('.*/up/kernel', '.*/down/kernel')
    with self.assertRaisesRegex(ValueError, 'up/kernel.*block_gain.*with_dense'):
      s24.where_it_pays(params, recipe, tokens=2048, device=H100)
    self.assertIs(s24.only_where_it_pays(params, recipe, tokens=2048, device=H100), recipe)

  def test_what_no_kernel_serves_is_not_priced_as_a_block_of_kernels(self):
    """The model asks for sums that stay float32, so its matmuls run dense and cannot lose, as kernels would here."""

    def f(params, x):
      h = jax.nn.gelu(jnp.dot(x, params['up']['kernel'], preferred_element_type=jnp.float32)).astype(x.dtype)
      return jnp.dot(h, params['down']['kernel'], preferred_element_type=jnp.float32)

    params = {'up': kernel(768, 3072), 'down': kernel(3072, 768)}
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), params)
    bound = s24.bind(ALL, f, params, jax.ShapeDtypeStruct((2048, 768), jnp.bfloat16))
    self.assertLess(s24.block_gain(768, 3072, ALL, tokens=2048, device=H100).gain or 1, 1)
    self.assertIs(s24.only_where_it_pays(params, bound, tokens=2048, device=H100), bound)

  @parameterized.parameters((2048, ['h_768']), (8192, []))
  def test_blocks_are_left_out_that_lose(self, tokens, expected):
    params = model_of(768, 2048)
    gains = {
      f'h_{d}': s24.block_gain(d, 4 * d, ALL, tokens=tokens, weight_dtype=jnp.float32, device=H100).gain
      for d in (768, 2048)
    }
    self.assertEqual([name for name, gain in gains.items() if gain < 1], expected)
    found = s24.only_where_it_pays(params, FST, tokens=tokens, device=H100)
    if not expected:
      self.assertIs(found, FST)
      return
    dense, *rest = found.rules
    self.assertEqual(dense.path.split('|'), [f'{name}/mlp/{w}/kernel' for name in expected for w in ('down', 'up')])
    self.assertEqual(dense.policy, s24.DotPolicy())
    self.assertEqual(tuple(rest), FST.rules)
    self.assertEqual((found.phases, found.masked_decay), (FST.phases, FST.masked_decay))

  @parameterized.parameters(False, True)
  def test_what_is_counted(self, gated):
    """A block by `block_gain` with its gate, and what is no block by itself."""
    params = model_of(512, gated=gated) | {'attn': {'q': kernel(512, 512), 'k': kernel(512, 512)}}
    layers = [mock.Mock(path=path, shape=leaf.shape, gain=gain, plain=None) for path, leaf, gain in (
      ('attn/k/kernel', params['attn']['k']['kernel'], 0.9), ('attn/q/kernel', params['attn']['q']['kernel'], 1.1),
      *((f'h_512/mlp/{name}/kernel', params['h_512']['mlp'][name]['kernel'], 1.5) for name in params['h_512']['mlp']),
    )]  # fmt: skip
    module = sys.modules[s24.only_where_it_pays.__module__]
    block = mock.Mock(return_value=mock.Mock(gain=0.99))
    with mock.patch.multiple(module, where_it_pays=lambda *_, **__: layers, block_gain=block):
      found = s24.only_where_it_pays(params, ALL, tokens=64)
    block.assert_called_once()
    self.assertEqual(block.call_args.args[:2], (512, 2048))
    self.assertEqual(block.call_args.kwargs['gated'], gated)
    self.assertEqual(
      set(found.rules[0].path.split('|')), {layer.path for layer in layers if layer.path != 'attn/q/kernel'}
    )

  @parameterized.parameters(
    (dict(q=(64, 64), k=(64, 64), v=(64, 64), o=(64, 64), up=(64, 256), down=(256, 64)), {'up', 'down'}),
    (dict(q=(64, 128), k=(64, 32), v=(64, 32), o=(128, 64), up=(64, 256), down=(256, 64)), {'q', 'o', 'up', 'down'}),
    (dict(up_0=(64, 256), down_0=(256, 64), up_1=(64, 256), down_1=(256, 64)), set()),
  )
  def test_layers_of_one_module_are_told_apart_by_their_shapes(self, shapes, blocks):
    """Blocks lose and single layers gain: what is left out was taken for blocks."""
    params = {'h_0': {name: kernel(*shape) for name, shape in shapes.items()}}
    layers = [mock.Mock(path=f'h_0/{name}/kernel', shape=shape, gain=1.1, plain=None) for name, shape in shapes.items()]
    module = sys.modules[s24.only_where_it_pays.__module__]
    lost = mock.Mock(return_value=mock.Mock(gain=0.9))
    with mock.patch.multiple(module, where_it_pays=lambda *_, **__: layers, block_gain=lost):
      found = s24.only_where_it_pays(params, ALL, tokens=64)
    left_out = set(found.rules[0].path.split('|')) if found is not ALL else set()
    self.assertEqual(left_out, {f'h_0/{name}/kernel' for name in blocks})

  def test_a_recipe_that_is_bound_knows_its_blocks(self):
    """By their shapes attention is a block, [out, in] weights and two blocks in one module are none."""

    def f(p, x):
      x = x + jax.nn.softmax((x @ p['q']) @ (x @ p['q']).T) @ (x @ p['q']) @ p['o']
      for i in range(2):
        x = x + (jax.nn.silu(x @ p[f'gate_{i}'].T) * (x @ p[f'up_{i}'].T)) @ p[f'down_{i}'].T
      return jax.nn.gelu(x @ p['first']) @ p['shared'] + jnp.tile(x, 4) @ p['shared']

    shapes = dict(q=(64, 128), o=(128, 64), first=(64, 256), shared=(256, 64), up_0=(512, 64), gate_0=(512, 64),
                  down_0=(64, 512), up_1=(512, 64), gate_1=(512, 64), down_1=(64, 512))  # fmt: skip
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
    bound = s24.bind(recipe, f, params, jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))
    self.assertCountEqual(
      map(dict, bound.blocks), [dict(gate=f'gate_{i}', up=f'up_{i}', down=f'down_{i}') for i in range(2)]
    )
    module = sys.modules[s24.only_where_it_pays.__module__]
    priced = []

    def lost(d, hidden, recipe, *, gated, weight_dtype, **counted):
      priced.append((d, hidden, gated, weight_dtype))
      for rule in recipe.rules:
        self.assertEqual(rule.policy, FST.rules[0].policy)  # of [in, out], as the sizes are
      return mock.Mock(gain=0.9)

    with mock.patch.object(module, 'block_gain', lost):
      found = s24.only_where_it_pays(params, bound, tokens=32, device=H100)
    self.assertEqual(priced, [(64, 512, True, jnp.bfloat16)] * 2)
    of_blocks = {f'{role}_{i}' for role in ('down', 'gate', 'up') for i in range(2)}
    self.assertEqual(set(found.rules[0].path.split('|')), of_blocks)
    self.assertEqual(found.blocks, ())
    self.assertIsNone(recipe.blocks)

  @parameterized.parameters((512, 16384), (384, 8192), (768, 1024))
  def test_a_block_whose_last_gradient_is_exact_is_priced_as_it_runs(self, d, tokens):
    """By itself the down-projection would pay and the other not, or the other way round."""
    every = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
    recipe = every.with_exact_gradients('.*down/.*')
    params = {'mlp': {'up': kernel(d, 4 * d), 'down': kernel(4 * d, d)}}
    gain = s24.block_gain(d, 4 * d, every.with_exact_gradients('down/.*'), tokens=tokens, device=H100).gain

    def loss(params, x):
      return jnp.sum(jax.nn.gelu(x @ params['mlp']['up']['kernel']) @ params['mlp']['down']['kernel'])

    bound = s24.bind(recipe, loss, params, jax.ShapeDtypeStruct((tokens, d), jnp.float32))
    for given in (recipe, bound):
      found = match_rules(params, s24.only_where_it_pays(params, given, tokens=tokens, device=H100))
      kept = {path for path, rule in found.items() if rule.policy.projection}
      self.assertEqual(kept, {'mlp/up/kernel', 'mlp/down/kernel'} if gain >= 1 else set())

  def test_a_gate_and_up_in_one_weight_are_counted_alone(self):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in (('w', (64, 512)), ('o', (256, 64)))}

    def f(p, x):
      gate, up = jnp.split(x @ p['w'], 2, axis=-1)
      return (jax.nn.silu(gate) * up) @ p['o']

    bound = s24.bind(ALL, f, params, jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))
    self.assertEqual([dict(paths) for paths in bound.blocks], [dict(gate_up='w', down='o')])
    with mock.patch.object(sys.modules[s24.only_where_it_pays.__module__], 'block_gain') as block_gain:
      s24.only_where_it_pays(params, bound, tokens=32, device=H100)
    block_gain.assert_not_called()

  def test_a_packing_that_micro_batches_share_costs_less(self):
    counts = (1, 2)
    gains = [
      s24.block_gain(
        1024, 4096, ALL, tokens=2048, micro_batches=count, weight_dtype=jnp.float32, device=H100
      ).gain for count in counts
    ]  # fmt: skip
    self.assertEqual([gain < 1 for gain in gains], [True, False])
    for params in (model_of(1024), {'down': kernel(4096, 1024)}):
      recipe = s24.recipes.transposable_srste('.*(up|down)/kernel', masked_decay=1e-4)
      found = [s24.only_where_it_pays(params, recipe, tokens=2048, micro_batches=n, device=H100) for n in counts]
      self.assertIsNot(found[0], recipe)
      self.assertIs(found[1], recipe)

  def test_a_rule_that_is_left_with_nothing_goes(self):
    params = model_of(768, 2048)
    rules = tuple(s24.Rule(f'h_{d}/.*', FST.rules[0].policy) for d in (768, 2048))
    found = s24.only_where_it_pays(params, s24.Recipe('two', rules), tokens=2048, device=H100)
    self.assertEqual(found.rules[1:], rules[1:])

  def test_what_was_not_measured_stays(self):
    self.assertIs(s24.only_where_it_pays(model_of(64), FST, tokens=16, device=H100), FST)
    self.assertIs(s24.only_where_it_pays(model_of(768), FST, tokens=2048, device='another GPU'), FST)

  def test_what_was_not_measured_is_said_to_stay(self):
    params = model_of(64, 768)
    with self.assertLogs('sparse24_jax', 'WARNING') as logs:
      s24.only_where_it_pays(params, FST, tokens=2048, device='another GPU')
    self.assertRegex(logs.output[0], r'2 of h_\*/mlp/down/kernel.*: left as .* on another GPU\. device= takes')
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      s24.only_where_it_pays(model_of(768), FST, tokens=2048, device=H100)

  def test_a_block_of_which_a_part_was_not_measured_stays(self):
    """A small one in FP8, say: also where its layers by themselves are expected to lose."""
    recipe = s24.recipes.s_ste('.*/mlp/.*', fp8=True)
    self.assertIsNone(s24.block_gain(768, 3072, recipe_of_all(recipe), tokens=2048, device=H100).gain)
    self.assertIs(s24.only_where_it_pays(model_of(768), recipe, tokens=2048, device=H100), recipe)
    layers = [mock.Mock(path=f'h_768/mlp/{name}/kernel', shape=shape, gain=0.5, plain=None) for name, shape in (
      ('down', (3072, 768)), ('up', (768, 3072)),
    )]  # fmt: skip
    module = sys.modules[s24.only_where_it_pays.__module__]
    unknown = mock.Mock(return_value=mock.Mock(gain=None))
    with mock.patch.multiple(module, where_it_pays=lambda *_, **__: layers, block_gain=unknown):
      self.assertIs(s24.only_where_it_pays(model_of(768), recipe, tokens=2048), recipe)
    unknown.assert_called_once()

  @parameterized.parameters(('first',), ('first', 'second'))
  @pytest.mark.few
  def test_the_rest_trains(self, *slow):
    """With the choice of the GPU's records replaced, since they hold nothing so small."""
    x = gaussian(0, (8, 32))
    params = parameters(Blocks(), x)
    recipe = s24.recipes.transposable_srste('.*', masked_decay=0.1)
    module = sys.modules[s24.only_where_it_pays.__module__]

    paths = [f'{name}/{w}/kernel' for name in params for w in params[name]]
    layers = [mock.Mock(path=path, shape=(128, 32) if '/down/' in path else (32, 128), plain=None) for path in paths]
    # Blocks are asked for in the order of the tree.
    gains = [mock.Mock(gain=0.5 if name in slow else 2.0) for name in params]
    block_gain = mock.Mock(side_effect=gains)
    with mock.patch.multiple(module, where_it_pays=lambda *_, **__: layers, block_gain=block_gain):
      recipe = s24.only_where_it_pays(params, recipe, tokens=8)
    tx = s24.sparse_training(optax.sgd(0.1), recipe)

    @jit
    def run(params):
      opt_state = tx.init(params)
      variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}
      weights = s24.project(params, opt_state, recipe)
      updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), opt_state, params)
      expected = Blocks().apply({'params': weights}, x)
      return s24.sparsify(Blocks(), recipe).apply(variables, x), expected, weights, updates

    found, expected, weights, updates = jax.device_get(run(params))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for name in params:
      zeros = sum(int((weights[name][w]['kernel'] == 0).sum()) for w in weights[name])
      self.assertEqual(zeros, 0 if name in slow else 32 * 128)
    moved = {name: any(bool(np.any(u['kernel'])) for u in updates[name].values()) for name in params}
    self.assertEqual(moved, {name: name not in slow for name in params})


if __name__ == '__main__':
  absltest.main()
