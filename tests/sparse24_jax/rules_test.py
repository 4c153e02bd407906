import re
from typing import NamedTuple
from unittest import mock

from absl.testing import absltest, parameterized
import flax.nnx
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

import sparse24_jax as s24
from sparse24_jax import alternatives, rules
from sparse24_jax.layout import Layout
from tests.draws import gaussian
from tests.standard import project

STE, FST = s24.DotPolicy(s24.magnitude()), s24.DotPolicy(s24.transposable(), input_grad='sparse')


class NamedAttention(NamedTuple):
  query: jax.Array
  key: jax.Array
  value: jax.Array


@flax.struct.dataclass
class Attention:
  query: jax.Array
  key: jax.Array
  value: jax.Array


def params() -> dict:
  layer = {
    'attn': {'kernel': jnp.ones((8, 8)), 'bias': jnp.ones(8)},
    'mlp': {'up': {'kernel': jnp.ones((8, 16)), 'bias': jnp.ones((2, 16))}, 'scale': jnp.ones((8, 8))},
  }
  return {'h_0': layer, 'h_1': layer, 'wte': {'embedding': jnp.ones((12, 8))}}


def recipe(*pairs) -> s24.Recipe:
  return s24.Recipe('r', tuple(s24.Rule(path, policy) for path, policy in pairs))


class MatchTest(parameterized.TestCase):
  @parameterized.parameters(
    ('.*/mlp/.*', ['h_0/mlp/up/kernel', 'h_1/mlp/up/kernel']),
    ('h_1/.*', ['h_1/attn/kernel', 'h_1/mlp/up/kernel']),
    ('.*', ['h_0/attn/kernel', 'h_0/mlp/up/kernel', 'h_1/attn/kernel', 'h_1/mlp/up/kernel']),
    (r'h_\d/attn/kernel', ['h_0/attn/kernel', 'h_1/attn/kernel']),
  )
  def test_whole_path_and_weights_only(self, path, expected):
    self.assertEqual(list(rules.match_rules(params(), recipe((path, STE)))), expected)

  @parameterized.parameters('mlp', 'h_0/mlp', 'kernel', '.*/embedding', '.*/bias', '.*/scale')
  def test_part_of_a_path_or_no_weight_is_an_error(self, path):
    with self.assertRaisesRegex(ValueError, f"rule '{path}' .*; weights are .*2 of h_\\*/attn/kernel"):
      rules.match_rules(params(), recipe((path, STE)))

  def test_a_pattern_of_vectors_alone_is_named_as_such(self):
    message = r'does\. It matches .*bias.*; these are dense without a rule: leave this one out$'
    with self.assertRaisesRegex(ValueError, message):
      rules.match_rules(params(), recipe(('.*', STE), ('.*/bias', STE)))

  def test_what_is_dense_anyway_may_be_named_as_dense(self):
    # One recipe serves norms of one layer and those that a scan has stacked.
    whole = recipe(('.*', STE)).with_dense('.*/bias')
    self.assertEqual(rules.match_rules(params(), whole).keys(), rules.match_rules(params(), recipe(('.*', STE))).keys())
    for path in ('nothing', 'h_0/.*'):  # a slip, and one that an earlier rule makes sparse
      with self.assertRaisesRegex(ValueError, f"rule '{path}' .*decides for no weight"):
        rules.match_rules(params(), recipe(('.*', STE), (path, s24.DotPolicy())))

  def test_the_first_match_decides(self):
    matched = rules.match_rules(params(), recipe(('h_0/.*', FST), ('.*/mlp/.*', STE)))
    self.assertEqual(
      {path: rule.policy for path, rule in matched.items()},
      {'h_0/attn/kernel': FST, 'h_0/mlp/up/kernel': FST, 'h_1/mlp/up/kernel': STE},
    )
    with self.assertRaisesRegex(ValueError, "rule 'h_0/.*' .*decides for no weight.* whole path"):
      rules.match_rules(params(), recipe(('.*', STE), ('h_0/.*', FST)))

  @parameterized.parameters(
    ('mlp/up/kernel', r"'\.\*/mlp/up/kernel'"), ('mlp/.*', r"'\.\*/mlp/\.\*'"),
    ('kernel|bias', r"'\.\*/\(\?:kernel\|bias\)'"),
  )  # fmt: skip
  def test_a_pattern_that_lacks_what_stands_in_front_is_completed(self, path, meant):
    with self.assertRaisesRegex(ValueError, rf'no earlier rule does; did you mean {meant}\?$'):
      rules.match_rules(params(), recipe((path, STE)))

  @parameterized.parameters('mlp', '(?i)mlp/.*', 'h_0/.*')
  def test_no_other_pattern_is_guessed(self, path):
    with self.assertRaises(ValueError) as error:
      rules.match_rules(params(), recipe(('.*', STE), (path, STE)))
    self.assertNotIn('did you mean', str(error.exception))

  @parameterized.parameters(
    (r'.*/(mlp|atn)/.*', "'atn' in the rule .* matches no weight, and .*; did you mean 'attn'"),
    (r'h_0/.*|h_7/.*', "'h_7/.*' in the rule"),
    (r'.*/(?:attn|(?:ff|ffn)/(?:up|down))/.*', r"'\(\?:ff\|ffn\)/\(\?:up\|down\)' in the rule .* of another model"),
    (r'(?i).*/(MLP|heads)/.*', "'heads' in the rule"),
    (r'(?=(?:.*/(?:a|b).*))?(?i:.*/(MLP|heads)/.*)', "'heads' in the rule"),
  )
  def test_an_alternative_that_matches_nothing_is_told(self, path, message):
    (said,) = rules.idle_alternatives(params(), recipe((path, STE)))
    self.assertRegex(said, message)
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      s24.sparse_training(optax.sgd(0.1), recipe((path, STE))).init(params())
    self.assertRegex(logged.output[0], message)

  @parameterized.parameters(
    '.*/(attn|mlp)/.*', 'h_(0|1)/.*', '(h|_|[01])+/attn/.*', r'.*/(attn|up)/(kernel|bias)', r'(h_\d/|)attn/kernel',
    r'h_(?!a|b)\d/[^|(]*/(up/)?kernel', '(?P<layer>h_0|h_1)/.*', r'.*/attn/kernel|.*/mlp/.*', '.*/(?i:attn|x)/.*',
    '(?x) .*attn.* # not (mlp|x))', r'(?=(?:.*/(attn|mlp)/.*)\Z)(?:.*/attn/.*)', r'.*/(?<!(a|b)/)attn/.*',
  )
  def test_alternatives_that_match_are_not(self, path):
    self.assertEmpty(rules.idle_alternatives(params(), recipe((path, STE))))

  @parameterized.parameters(
    ('h/(up|down)|head', 'head|lm_head', "'lm_head' in the rule .*, and leaves none dense: mistyped, or of another"),
    ('h/(up|down)|hed', None, "'hed' in the rule .*, and makes none sparse; did you mean 'head'"),
    ('h/(up|down)|head', 'h/(up|dwon)', "'dwon' in the rule .*, and leaves none dense; did you mean 'down'"),
    ('h/(up|down)|h', None, "'h' in the rule .*, and makes none sparse: a rule matches whole paths$"),
    (r'h(\d|1\d|[2-4][0-9]|5\d{1,2}|)/.*', None, r"'\\\\d' in the rule .*, and makes none sparse$"),
  )  # fmt: skip
  def test_what_it_was_meant_for(self, path, dense, message):
    made = recipe((path, STE))
    tree = {'h': {'up': jnp.ones((8, 8)), 'down': jnp.ones((8, 8))}, 'head': jnp.ones((8, 8))}
    self.assertRegex(rules.idle_alternatives(tree, made.with_dense(dense) if dense else made)[0], message)

  def test_each_of_several_is_told_once(self):
    path = r'.*/(?:attn|(?:ff|ffn)/(?:up|down)|f)/.*'
    self.assertEqual(alternatives.idle(path, ['h/attn/k']), ['(?:ff|ffn)/(?:up|down)', 'f'])

  @parameterized.parameters(False, True)
  def test_no_long_pattern_is_compiled_for_each_of_its_alternatives(self, strangers):
    paths = [f'h_{i}/mlp/{name}-proj/kernel' for i in range(10) for name in ('up', 'down', 'gate', 'out')]
    pattern = '|'.join(map(re.escape, [*paths, *(f'{path}s' for path in paths if strangers)]))
    with (
      mock.patch.object(re, 'compile', wraps=re.compile) as compiled,
      mock.patch.object(re, 'fullmatch', wraps=re.fullmatch) as matched,
    ):
      found = alternatives.idle(pattern, paths)
    self.assertLen(found, 40 * strangers)
    tried = {call.args[0] for call in (*compiled.mock_calls, *matched.mock_calls)}
    self.assertLessEqual(sum(map(len, tried)), 2 * len(pattern))

  def test_a_tree_of_placeholders_is_no_model(self):
    made = recipe(('h_0/(mlp|attn)/.*', STE))
    tx = s24.sparse_training(optax.sgd(0.1), made)
    state = tx.init(params())
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      optax.tree_map_params(tx, lambda leaf: leaf, state)

  def test_nor_is_one_group_of_several(self):
    made = recipe(('h_./(mlp|attn)/.*', STE))
    groups = {name: s24.sparse_training(optax.sgd(0.1), made) for name in ('mlp', 'attn')}
    layer = {'attn': jnp.ones((8, 8)), 'mlp': {'up': jnp.ones((8, 16))}}
    tx = optax.multi_transform(groups, {'h_0': {'attn': 'attn', 'mlp': 'mlp'}})
    tree = {'h_0': {'attn': {'kernel': layer['attn']}, 'mlp': layer['mlp']}}
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      tx.init(tree)

  def test_shapes_and_no_arrays_will_do(self):
    shapes = jax.eval_shape(params)
    self.assertLen(rules.match_rules(shapes, recipe(('.*/mlp/.*', STE))), 2)
    self.assertEqual(rules.match_rules({}, recipe(('.*/mlp/.*', STE))), {})

  def test_two_parameters_of_one_path(self):
    tree = {'a/b': {'kernel': jnp.ones((8, 8))}, 'a': {'b': {'kernel': jnp.ones((4, 4))}}, 'c': jnp.ones((4, 4))}
    with self.assertRaisesRegex(ValueError, "2 parameters have the path 'a/b/kernel': a slash in a name"):
      rules.match_rules(tree, recipe(('.*', STE)))
    self.assertEqual(list(rules.match_rules(tree, recipe(('c', STE)))), ['c'])

  def test_other_trees(self):
    @flax.struct.dataclass
    class Layer:
      kernel: jax.Array

    tree = [Layer(jnp.ones((4, 4))), (flax.nnx.Param(jnp.ones((8, 4))),)]
    self.assertEqual(list(rules.match_rules(tree, recipe(('.*', STE)))), ['0/kernel', '1/0'])

  @parameterized.parameters('tuple', 'dataclass')
  def test_a_field_named_value_among_others_keeps_its_name(self, kind):
    """Also in the trees of an optimizer for a part of the weights, where nothing is left of the others."""
    attention = (NamedAttention if kind == 'tuple' else Attention)(*gaussian(0, (3, 8, 8)))
    tree, fitting = {'attn': attention}, recipe(('attn/(query|value)', STE))
    self.assertEqual([path for path, _ in rules.leaves_by_path(tree)], ['attn/query', 'attn/key', 'attn/value'])
    alone = recipe(('attn/value', STE))
    for given in (fitting, alone):
      tx = s24.sparse_training(optax.adam(0.1), given)
      _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
      expected = [f'attn/{name}' for name in ('query', 'value') if given is fitting or name == 'value']
      self.assertEqual(list(s24.get_flip_rate(state).per_weight), expected)
      projected = project(tree, state, given)['attn']
      s24.verify24(projected.value)
      np.testing.assert_array_equal(projected.key, attention.key)
    tx = optax.partition(
      {'sparse': s24.sparse_training(optax.adam(0.1), alone), 'plain': optax.sgd(0.1)},
      {'attn': type(attention)('plain', 'plain', 'sparse')},
    )
    _, state = tx.update(tree, tx.init(tree), tree)
    s24.verify24(project(tree, state, alone)['attn'].value)


class GroupsTest(parameterized.TestCase):
  @parameterized.parameters(((6, 8), STE, -2, 6), ((8, 6), FST, -1, 6), ((3, 6, 8), FST, -2, 6))
  def test_weights_that_hold_no_whole_groups(self, shape, policy, axis, length):
    with self.assertRaisesRegex(ValueError, f'a/kernel .* length {length} along axis {axis}; .* multiple of 4'):
      rules.match_rules({'a': {'kernel': jnp.ones(shape)}}, recipe(('.*', policy)))
    rules.match_rules({'a': {'kernel': jnp.ones((8, 6))}}, recipe(('.*', STE)))

  @parameterized.parameters(
    ((16, 32), STE, (None, 'x'), True),
    ((16, 32), FST, (None, 'x'), True),
    ((32, 16), STE, ('x', None), True),
    ((16, 32), STE, ('x', None), False),
    ((32, 16), FST, (None, 'x'), False),
    ((32, 16), STE, (None, 'x'), True),
    ((8, 4, 4), FST, ('x', None, None), True),
  )
  def test_groups_that_straddle_shards(self, shape, policy, spec, good):
    mesh = Mesh(np.array(jax.devices()), ('x',))
    w = jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*spec)))
    if good:
      self.assertLen(rules.match_rules({'a': w}, recipe(('a', policy))), 1)
    else:
      with self.assertRaisesRegex(ValueError, 'a of shape .* is sharded to .* holds 2 entries along axis -[12],'):
        rules.match_rules({'a': w}, recipe(('a', policy)))

  @parameterized.parameters(False, True)
  def test_joined_axes_that_explicit_axes_divide_on_an_inner_one_are_refused(self, traced):
    mesh = Mesh(np.array(jax.devices()), ('x',), axis_types=(AxisType.Explicit,))
    w = jax.device_put(jnp.ones((2, 8, 16, 8)), NamedSharding(mesh, PartitionSpec(None, 'x', None, None)))

    def check(w):
      rules._check_shards('kv', w, s24.magnitude(), Layout((), (2,), (0, 1, 3)))
      return w

    told = r'kv of shape \(2, 8, 16, 8\) is sharded to .* join axes \(0, 1, 3\) to one, which a mesh of explicit'
    with self.assertRaisesRegex(ValueError, told):
      (jax.jit(check) if traced else check)(w)

  @parameterized.parameters(
    ((16, 3, 8, 16), (None, None, 'x'), True),
    ((16, 8, 16), (None, 'x'), False),
    ((16, 1, 8, 16), (None, None, 'x'), False),
  )
  def test_joined_axes_that_are_divided_on_an_inner_one_are_told(self, shape, spec, told):
    mesh = Mesh(np.array(jax.devices()), ('x',))
    w = jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*spec)))
    layout = Layout((), (0,), tuple(range(1, len(shape))))
    with mock.patch.object(rules._dispatch, 'log_once') as log:
      rules._check_shards('qkv', w, s24.transposable(), layout)
    self.assertEqual(log.call_count, told)
    if told:
      text = str(log.call_args)
      self.assertRegex(text, r'qkv of shape \(16, 3, 8, 16\) is sharded to .* gather it. Divide the first')


if __name__ == '__main__':
  absltest.main()
