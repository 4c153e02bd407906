"""What reads weights beside their matmuls: right in a penalty, refused in a matmul, warned of elsewhere."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels import _dispatch
import sparse24_jax as s24
from tests.sparse24_jax.binding.functions import shape, traces

STE = s24.recipes.ste('w')


def _squares(w):
  return jnp.sum(w**2)


def _loss(y):
  return jnp.mean(y**2)


def _layers(w):
  """Two layers in one weight."""
  return w.reshape(16, 2, 16).swapaxes(0, 1)


def _normalised_layers(w, x):
  return jax.lax.scan(lambda x, w: (x @ w / jnp.linalg.norm(w), None), x, _layers(w))[0]


def _carried_norm(w, x):
  step = lambda c, w: ((c[0] @ w * c[1], jnp.linalg.norm(w)), None)  # noqa: E731
  return jax.lax.scan(step, (x, jnp.float32(1)), _layers(w))[0][0]


def _by_hand(x, w):
  return jax.lax.map(lambda row: (row[:, None] * w).sum(0), x)


def _balanced(w, x):
  """Losses that are weighted by their size."""
  losses = jnp.stack([_loss(x @ w), _squares(w)])
  return losses @ jax.nn.softmax(losses) + jnp.sum(losses / jax.lax.stop_gradient(losses))


def _metrics_of_layers(w, x):
  """How layers change the size of what goes through them."""
  def layer(x, w):
    y = jnp.tanh(x @ w)
    return y, (jnp.linalg.norm(w), jnp.sqrt(_loss(y)))

  y, (norms, sizes) = jax.lax.scan(layer, x, _layers(w))
  return _loss(y), {'gain': sizes / norms, 'log_gain': jnp.log(sizes) - jnp.log(norms)}


def _penalty_of_layers(w, x):
  """Layers whose norms are summed up on the way, with a metric of each."""
  def layer(carry, w):
    x, penalty = carry
    y = jnp.tanh(x @ w)
    return (y, penalty + _squares(w)), {'norm': jnp.sqrt(_squares(w)), 'gain': _loss(y) / _squares(w)}

  (y, penalty), metrics = jax.lax.scan(jax.checkpoint(layer), (x, 0.0), _layers(w))
  return _loss(y) + 0.1 * penalty, metrics


class SumsTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('in_front', lambda w, x: (x / jnp.linalg.norm(w)) @ w, 'reduce_sum'),
    ('normalised', lambda w, x: x @ (w / jnp.abs(w).max()), 'reduce_max'),
    ('normalised_in_a_loop', lambda w, x: jax.lax.map(lambda r: x @ (w * r), jnp.abs(w).max(0)), 'reduce_max'),
    ('norm_of_scaled', lambda w, x: x @ (w / jnp.sqrt(jnp.sum((w * 2) ** 2))), 'reduce_sum'),
    ('feature', lambda w, x: jnp.concatenate([x @ w, jnp.full((4, 1), w.max())], 1) @ jnp.ones((33, 2)), 'reduce_max'),
    ('product_with_itself', lambda w, x: x @ (w @ w.T) @ w, 'dot_general'),
  )  # fmt: skip
  def test_refuses_what_a_matmul_multiplies_by(self, f, summed):
    message = rf"^w of shape .*: {summed} at .* dense, and dot_general at .* multiplies by .*with_dense\('w'\)$"
    with self.assertRaisesRegex(ValueError, message):
      s24.bind(STE, lambda p, x: f(p['w'], x), {'w': jnp.ones((16, 32))}, jnp.ones((4, 16)))

  @parameterized.named_parameters(
    ('weight_norm', lambda w, x: x @ w * (2 / jnp.linalg.norm(w, axis=0, keepdims=True)), 'reduce_sum', 'mul'),
    ('detached', lambda w, x: x @ w / jax.lax.stop_gradient(jnp.linalg.norm(w, 2, 0, True)), 'reduce_sum', 'div'),
    ('one_number', lambda w, x: x @ w / jnp.linalg.norm(w), 'reduce_sum', 'div'),
    ('largest', lambda w, x: x @ w / jnp.abs(w).max(), 'reduce_max', 'div'),
    ('standardised', lambda w, x: x @ w - x[:, :1] * w.mean(0, keepdims=True), 'reduce_sum', 'mul'),
    ('loss_of_standardised', lambda w, x: _loss(x @ w - x[:, :1] * w.mean(0, keepdims=True)), 'reduce_sum', 'mul'),
    ('bias', lambda w, x: _loss(jax.nn.relu(x @ w + w.mean())), 'reduce_sum', 'add'),
    ('layers', _normalised_layers, 'reduce_sum', 'div'),
    ('the_layer_before', _carried_norm, 'reduce_sum', 'mul'),
    ('branch', lambda w, x: jax.lax.cond(_squares(w) > 1, lambda y: y, lambda y: 2 * y, x @ w), 'reduce_sum', 'cond'),
    ('where', lambda w, x: jnp.where(w.max() < 2, x @ w, 0), 'reduce_max', 'select_n'),
    ('metric_of_columns', lambda w, x: (_loss(x @ w), jnp.linalg.norm(x @ w, 2, 0) / jnp.linalg.norm(w, 2, 0)),
     'reduce_sum', 'div'),
    ('by_hand', lambda w, x: (x @ w, (x[0][:, None] * w).sum(0)), 'reduce_sum', 'mul'),
    ('by_hand_in_a_loss', lambda w, x: _loss(x @ w) + _loss(_by_hand(x, w)), 'reduce_sum', 'mul'),
    ('by_hand_with_sizes', lambda w, x: (x @ w, _by_hand(x**2, jnp.abs(w))), 'reduce_sum', 'mul'),
    ('inputs', lambda w, x: (x @ w, x / jnp.linalg.norm(w)), 'reduce_sum', 'div'),
    ('constants', lambda w, x: (x @ w, jnp.asarray(np.ones((4, 16))) / jnp.linalg.norm(w)), 'reduce_sum', 'div'),
    ('inputs_and_sums', lambda w, x: (x @ w, x[:, :1] * w.sum(0, keepdims=True)), 'reduce_sum', 'mul'),
    ('one_prediction', lambda w, x: jnp.tanh(x[0] @ w).sum() / jnp.linalg.norm(w), 'reduce_sum', 'div'),
    ('predictions', lambda w, x: jax.lax.map(lambda x: jnp.tanh(x @ w).sum() / jnp.linalg.norm(w), x),
     'reduce_sum', 'div'),
    ('critic', lambda w, x: jnp.mean(x @ w) / jnp.linalg.norm(w), 'reduce_sum', 'div'),
    ('one_row', lambda w, x: (x[0] @ w / jnp.linalg.norm(w, axis=0)) @ jnp.ones((32, 2)), 'reduce_sum', 'div'),
  )  # fmt: skip
  def test_warns_of_what_meets_what_matmuls_make(self, f, summed, by):
    message = rf'w: {summed} at .* dense, and {by}\w* at .* puts .* right in a penalty or a metric'
    # Shapes are enough: no program is compiled.
    given = lambda p, x: f(p['w'], x), {'w': shape(16, 32)}, shape(4, 16)
    checked = s24.check(STE, *given)
    self.assertTrue(checked.ok, checked)
    self.assertRegex('\n'.join(checked.notes), f'WARNING  {message}')
    _dispatch.log_once.cache_clear()
    with self.assertLogs('sparse24_jax', 'WARNING') as logs:
      bound = s24.bind(STE, *given)
    self.assertRegex('\n'.join(logs.output), message)
    traces(bound, *given)

  @parameterized.named_parameters(
    ('a_scale', lambda params, x: x * params['other'], r'other of shape .*: mul .* before a matmul reads it'),
    ('a_table', lambda params, x: x + params['other'], r'other of shape .*: add .* before a matmul reads it'),
  )
  def test_only_what_nothing_follows_is_refused(self, first, message):
    # Not the weights whose matmuls read what was made of it.
    params = {name: jnp.ones((16, 16)) for name in ('other', 'query', 'key', 'up')}
    x = jnp.ones((16, 16))

    def loss(params, x):
      x = first(params, x)
      scores = (x @ params['query']) @ (x @ params['key']).T
      return _loss(jax.nn.softmax(scores) @ x @ params['up'])

    with self.assertRaises(ValueError) as refused:
      s24.bind(s24.recipes.ste('.*'), loss, params, x)
    self.assertRegex(str(refused.exception), message)
    self.assertNotIn('\n', str(refused.exception))
    bound = s24.bind(s24.recipes.ste('.*').with_dense('other'), loss, params, x)
    self.assertEqual([weight.path for weight in bound.weights], ['key', 'query', 'up'])

  def test_a_penalty_may_multiply_what_nothing_follows(self):
    params = {name: jnp.ones((16, 16)) for name in ('mix', 'up', 'down')}

    def loss(params, x):
      penalty = _squares((params['mix'] * jnp.abs(params['up'])) @ params['down'])
      return _loss(jax.nn.relu(x @ params['up']) @ params['down']) + penalty

    bound = s24.bind(s24.recipes.ste('up|down'), loss, params, jnp.ones((4, 16)))
    self.assertEqual([weight.path for weight in bound.weights], ['down', 'up'])

  @parameterized.named_parameters(
    ('selected', lambda p, x: p['other'] @ jnp.where(jnp.isfinite(p['up']), p['down'], 0.0)),
    ('multiplied', lambda p, x: (jnp.isfinite(p['up']) * x) @ (jnp.isfinite(p['up']) * p['down'])),
    ('no_nan', lambda p, x: x @ jnp.where(jnp.isnan(p['up']), 0.0, p['down'])),
  )
  def test_what_asks_whether_a_weight_is_finite_hides_no_other(self, more):
    params = {name: jnp.ones((16, 16)) for name in ('other', 'up', 'down')}
    loss = lambda p, x: _loss(x @ p['up'] @ p['down'] + more(p, x))  # noqa: E731
    with self.assertRaisesRegex(ValueError, '^down of shape .* changes it before a matmul reads it'):
      s24.bind(s24.recipes.ste('up|down'), loss, params, jnp.ones((16, 16)))

  @parameterized.named_parameters(
    ('squares', lambda w, x: _loss(x @ w) + 0.1 * _squares(w)),
    ('norm', lambda w, x: _loss(x @ w) + 0.1 * jnp.linalg.norm(w)),
    ('groups', lambda w, x: _loss(x @ w) + jnp.sum(jnp.sqrt(jnp.sum(w**2, 0) + 1e-6))),
    ('traced_factors', lambda w, x: _loss(x @ w) + x[0, 0] * jnp.minimum(x[0, 1] / 100, 1) * _squares(w)),
    ('factors_of_groups', lambda w, x: _loss(x @ w) + x[0] @ jnp.sum(w**2, 1)),
    ('each_example', lambda w, x: jnp.mean(jax.vmap(lambda x: _loss(x @ w) + 0.1 * _squares(w))(x))),
    ('masked_examples', lambda w, x: jnp.sum(jnp.where(x[:, 0] > 0, jnp.sum(x @ w, 1) + _squares(w), 0) / 3)),
    ('micro_batches', lambda w, x: jnp.mean(jax.lax.map(lambda x: _loss(x @ w) + _squares(w), x[:, None]) * x[:, 0])),
    ('losses', lambda w, x: jnp.stack([_loss(x @ w), _squares(w)]) @ jnp.array([1, 0.1])),
    ('models', lambda w, x: jnp.sum(jax.vmap(lambda w: _loss(x @ w) + _squares(w))(_layers(w)))),
    ('perplexity', lambda w, x: jnp.exp(_loss(x @ w) + _squares(w))),
    ('layers', _penalty_of_layers),
    ('metrics', lambda w, x: (_loss(x @ w), jnp.linalg.norm(w, axis=0), _loss(x @ w) / jnp.linalg.norm(w))),
    ('product_with_itself', lambda w, x: _loss(x @ w) + jnp.vdot(w, w)),
    ('orthogonality', lambda w, x: _loss(x @ w) + jnp.sum((w.T @ w - jnp.eye(32)) ** 2)),
    ('cosines', lambda w, x: _loss(x @ w) + _squares(w.T @ (w / jnp.linalg.norm(w, 2, 0, True)))),
    ('anchor', lambda w, x: _loss(x @ w) + jnp.sum((w - jnp.tile(x, (4, 2))) ** 2)),
    ('weighted_anchor', lambda w, x: _loss(x @ w) + jnp.sum(jnp.tile(x, (4, 2)) * (w - jnp.tile(x, (4, 2))) ** 2)),
    ('centre', lambda w, x: _loss(x @ w) + jnp.sum((w - jnp.tile(x[:1], (1, 2))) ** 2)),
    ('product_with_an_anchor', lambda w, x: _loss(x @ w) - jnp.vdot(w, np.ones((16, 32))) / jnp.linalg.norm(w)),
    ('nuclear_norm', lambda w, x: _loss(x @ w) + jnp.linalg.norm(w, 'nuc')),
    ('nuclear_norm_of_layers', lambda w, x: _loss(x @ w) + sum(jnp.linalg.norm(v, 'nuc') for v in _layers(w))),
    ('largest_entries', lambda w, x: _loss(x @ w) + jax.lax.top_k(jnp.abs(w).ravel(), 9)[0].sum()),
    ('quantiles', lambda w, x: (_loss(x @ w), jnp.quantile(jnp.abs(w), 0.9), jnp.histogram(w))),
    ('entries_printed', lambda w, x: (jax.debug.print('{} {}', w, x), x @ w)[1]),
    ('entry_printed', lambda w, x: (jax.debug.print('{}', w[0, 0]), x @ w)[1]),
    ('balanced', _balanced),
    ('metrics_of_layers', _metrics_of_layers),
    ('times_sizes', lambda w, x: _loss(x @ w) + jnp.sum(jnp.abs(w).sum(0) * jnp.abs(x @ w).mean(0))),
    ('share_of_columns', lambda w, x: (_loss(x @ w), jnp.mean((jnp.abs(w).max(0) > 1) & ((x @ w).max(0) > 0)))),
    ('sums_by_loss', lambda w, x: (_loss(x @ w), jnp.abs(w).sum(0) * _loss(x @ w))),
    ('deviation', lambda w, x: (_loss(x @ w), jnp.std(w))),
    ('guard', lambda w, x: x @ w * jnp.where(jnp.all(jnp.isfinite(w)), 1.0, jnp.nan)),
    ('guard_of_nan', lambda w, x: jnp.where(jnp.isnan(w).any(), jnp.nan, x @ w)),
    ('printed', lambda w, x: (jax.debug.print('{}', x.sum()), x @ w)[1]),
  )  # fmt: skip
  def test_a_penalty_or_a_metric_reads_the_weight_as_it_is(self, f):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((16, 32), (4, 16)))
    bound = s24.bind(STE, lambda p, x: f(p['w'], x), {'w': w}, x)
    self.assertEqual([(weight.path, weight.notes) for weight in bound.weights], [('w', ())])

  @parameterized.named_parameters(
    ('by_hand', lambda w, x: (x[:, :, None] * w[None]).sum(1), 'mul at .*, then reduce_sum at'),
    ('distances', lambda w, x: jnp.abs(x[:, :, None] - w[None]).sum(1), 'sub at .*, then reduce_sum at'),
    ('of_one_example', lambda w, x: jnp.abs(x[0][:, None] - w).sum(0), 'sub at .*, then reduce_sum at'),
    ('repeated', lambda w, x: jnp.abs(jnp.broadcast_to(x[0][:, None], w.shape) - w).sum(0), 'sub at .*, then reduce_'),
    ('changed_with_itself', lambda w, x: x @ ((w + x[:1].T) @ (w * 2).T), 'multiplies it by itself'),
    ('scores', lambda w, x: jax.lax.map(lambda x: jnp.tensordot(jnp.outer(x, x), w[:, :16], 2), x), 'a score, not a'),
    ('loss_of_scores', lambda w, x: _loss(jax.lax.map(lambda x: jnp.vdot(jnp.outer(x, x), w[:, :16]), x)), 'a score'),
  )
  def test_a_matmul_by_another_name_is_no_penalty(self, f, message):
    with self.assertRaisesRegex(ValueError, message):
      s24.bind(STE, lambda p, x: (x @ p['w'], f(p['w'], x)), {'w': jnp.ones((16, 32))}, jnp.ones((4, 16)))

  @parameterized.named_parameters(
    ('bias_in_the_last_row', lambda w, x: x @ w[:12] + w[12:13]),
    ('row_times_a_result', lambda w, x: _loss(x @ w[:12] * w[12:13])),
    ('row_in_a_hidden_layer', lambda w, x: _loss(jnp.tanh(x @ w[:12] + w[12:13]))),
    ('sum_added_to_inputs', lambda w, x: (x @ w[:12], x + w[:12].sum(1)[None])),
    ('power_of_inputs', lambda w, x: (x @ w[:12], jnp.abs(x) ** jnp.std(w))),
  )
  def test_entries_and_sums_beside_results_are_warned_of(self, f):
    given = lambda p, x: f(p['w'], x), {'w': shape(16, 32)}, shape(4, 12)
    self.assertRegex('\n'.join(s24.check(STE, *given).notes), 'reads it as it is stored, dense')
    traces(s24.bind(STE, *given), *given)

  @parameterized.named_parameters(
    ('centre', lambda p: jnp.sum((p['w'] - p['c']) ** 2)),
    ('groups', lambda p: jnp.sum(jnp.sqrt(jnp.sum((p['w'] - p['c']) ** 2, 0)))),
    ('codebook', lambda p: jnp.sum(jnp.min((p['w'][..., None] - p['c'][None]) ** 2, -1))),
    ('of_two', lambda p: jnp.sum((p['w'].T @ p['v']) ** 2) + jnp.vdot(p['w'], p['v'])),
    ('of_all', lambda p: jnp.linalg.norm(jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(p)]))),
  )
  def test_a_penalty_of_several_parameters(self, penalty):
    params = {'w': jnp.ones((16, 32)), 'v': jnp.ones((16, 32)), 'c': jnp.ones((1, 32))}
    f = lambda p, x: _loss(x @ p['w'] + x @ p['v']) + penalty(p)  # noqa: E731
    bound = s24.bind(s24.recipes.ste('w|v'), f, params, jnp.ones((4, 16)))
    self.assertEqual([weight.notes for weight in bound.weights], [(), ()])

  @parameterized.named_parameters(
    ('sorted', lambda w, x: x @ jnp.sort(w, 0), 'sort at'),
    ('singular_values', lambda w, x: x @ w / jnp.linalg.svd(w, compute_uv=False)[0], 'svd at'),
    ('joined', lambda w, x: x @ jnp.concatenate([w, w], 1), 'concatenate at'),
    ('order', lambda w, x: (x @ w)[:, jnp.argsort(jnp.sort(w, 0)[0])], 'sort at'),
    ('looked_up', lambda w, x: _loss(w[jnp.argmax(x, 1)]), 'gather at'),
    ('convolution', lambda w, x: jax.lax.conv(x[None, None], w[None, None], (1, 1), 'SAME').sum(), 'conv_.* at'),
    ('convolution_of_constants',
     lambda w, x: jax.lax.conv(jnp.asarray(np.ones((1, 1, 4, 4))), w[None, None], (1, 1), 'SAME').sum(), 'conv_.* at'),
    ('changed', lambda w, x: jnp.sum(x @ jnp.sin(w)), 'sin at .* changes it before a matmul'),
    ('column', lambda w, x: jax.lax.map(lambda x: x @ w[:, 0], x), 'dot_general at .* a vector'),
    ('added_to_inputs', lambda w, x: x + jnp.sort(w, 1)[None, :, 0], 'sort at'),
    ('order_of_inputs', lambda w, x: x[:, jnp.argsort(jnp.sort(w, 1)[:, 0])], 'sort at'),
    ('called_back', lambda w, x: x @ w + jax.pure_callback(np.max, jax.ShapeDtypeStruct((), w.dtype), w), 'pure_'),
  )  # fmt: skip
  def test_what_nothing_follows_is_no_part_of_the_model(self, f, message):
    with self.assertRaisesRegex(ValueError, f'^w of shape .*: {message}.*Nothing follows a weight there'):
      s24.bind(STE, lambda p, x: (x @ p['w'], f(p['w'], x)), {'w': jnp.ones((16, 32))}, jnp.ones((4, 16)))

  @parameterized.named_parameters(
    ('norm', lambda p: optax.tree.norm(p, squared=True)),
    ('sorted', lambda p: jnp.sum(jnp.sort(p['w'].ravel()) ** 2)),
    ('singular_values', lambda p: jnp.sum(jnp.linalg.svd(p['w'], compute_uv=False) ** 2)),
    ('of_an_anchor', lambda p: jnp.vdot(p['w'], jax.lax.stop_gradient(p['w']))),
  )
  def test_a_penalty_is_of_the_dense_weight(self, penalty):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)
    f = lambda p, x: jnp.sum(x @ p['w']) + penalty(p)  # noqa: E731
    bound = s24.bind(STE, f, {'w': w}, jnp.zeros((4, 16)))
    variables = s24.sparse_variables({'w': w}, s24.sparse_training(optax.sgd(0.1), bound).init({'w': w}), bound)
    loss = s24.sparsify(f, bound)({'w': w}, variables, None, jnp.zeros((4, 16)))
    np.testing.assert_allclose(loss, np.sum(np.square(w, dtype=np.float64)), rtol=1e-5)

  def test_another_function_than_the_bound_one(self):
    params, x = {'w': jnp.ones((16, 32))}, jnp.ones((4, 16))
    bound = s24.bind(STE, lambda p, x: x @ p['w'], params, x)
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
    other = s24.sparsify(lambda p, x: (x / jnp.linalg.norm(p['w'])) @ p['w'], bound)
    with self.assertRaisesRegex(ValueError, '^w: reduce_sum at .* dense, and dot_general .*Bind the recipe to what is'):
      other(params, variables, None, x)

  def test_warns_of_another_function_than_the_bound_one_too(self):
    params, x = {'w': jnp.ones((16, 32))}, jnp.ones((4, 16))
    logits = lambda p, x: x @ p['w']  # noqa: E731
    cosines = lambda p, x: logits(p, x) / jnp.linalg.norm(p['w'], axis=0, keepdims=True)  # noqa: E731
    bound = s24.bind(STE, logits, params, x)
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
    _dispatch.log_once.cache_clear()
    with self.assertLogs('sparse24_jax', 'WARNING') as logs:
      s24.sparsify(cosines, bound)(params, variables, None, x)
    self.assertRegex('\n'.join(logs.output), 'w: reduce_sum at .* dense, and div at .* right in a penalty or a metric')
    with self.assertNoLogs('sparse24_jax', 'WARNING'):  # said once, by whoever sees it first
      s24.sparsify(cosines, s24.bind(STE, cosines, params, x))(params, variables, None, x)

  def test_a_weight_in_fp8_without_a_projection_has_its_own_norm(self):
    fp8 = s24.Recipe('fp8', (s24.Rule('w', s24.DotPolicy(precision='fp8')),))
    f = lambda p, x: x @ p['w'] / jnp.linalg.norm(p['w'])  # noqa: E731
    self.assertLen(s24.bind(fp8, f, {'w': jnp.ones((16, 32))}, jnp.ones((4, 16))).weights, 1)
    with self.assertRaisesRegex(ValueError, 'multiplies it by itself'):
      s24.bind(fp8, lambda p, x: x @ p['w'] @ (p['w'].T @ p['w']), {'w': jnp.ones((16, 32))}, jnp.ones((4, 16)))


if __name__ == '__main__':
  absltest.main()
