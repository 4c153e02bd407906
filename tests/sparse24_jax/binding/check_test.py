"""`check`, as a function and as a command."""

import contextlib
import dataclasses
import functools
import io
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import _dispatch
import sparse24_jax as s24
from sparse24_jax.__main__ import main
from sparse24_jax.integration import check as check_module
from sparse24_jax.optim import try_chain
from tests.draws import gaussian
from tests.sparse24_jax.binding.functions import arguments, CASES, shape


def example():
  return CASES['attention'].f, *arguments('attention')


def shapes():
  f, *given = example()
  return f, *jax.eval_shape(lambda: given)


def without_args():
  return CASES['attention'].f, arguments('attention')[0]


def unreadable():
  return lambda p, x: x @ jnp.sin(p['w']), {'w': jnp.ones((16, 8))}, jnp.ones((4, 16))


def params_later():
  return lambda x, *, params=None: x.reshape(-1, 8) @ params['w'], {'w': jnp.ones((8, 4))}, jnp.ones((2, 8))


def bound_check(recipe, f, *args):
  return s24.check(s24.bind(recipe, f, *args), f, *args)


def of_schedule(path, density):
  return s24.Recipe('own', (s24.Rule(path, s24.DotPolicy(s24.dynamic_sparse(density))),))


class CheckTest(parameterized.TestCase):

  def test_the_zeros_and_the_gradient_are_measured(self):
    f, params, x = example()
    checked = bound_check(s24.recipes.ste('.*'), f, params, x)
    self.assertTrue(checked.ok)
    self.assertEqual([w.pruned for w in checked.weights], [0.5, 0.5])
    self.assertGreater(min(w.reached for w in checked.weights), 0.4)
    self.assertIn('\nzeros: share of the entries that are pruned; gradient: share of the pruned', str(checked))
    frozen = s24.check(s24.recipes.ste('.*'), lambda p, x: f(jax.lax.stop_gradient(p), x), params, x)
    self.assertFalse(frozen.ok)
    self.assertIn('no gradient reaches it at all: it is frozen', str(frozen))

  @parameterized.parameters(
    (functools.partial(s24.recipes.set_, density=0.2), 0.8, 'all steps'),
    (functools.partial(s24.recipes.static, density=0.2), 0.8, 'all steps'),
    (functools.partial(s24.recipes.rigl, density=0.2, total_steps=400), 0.8, 'all steps'),
    (functools.partial(s24.recipes.mixed_sparsity, density=0.1, total_steps=4000), 0.9, 'step 400, where .*st'),
    (
      functools.partial(s24.recipes.mixed_sparsity, density=0.1, total_steps=4000, structure='2:4'), 0.9,
      'step 400, where the density is lowest',
    ),
    (lambda path: of_schedule(path, lambda step: jnp.where(step > 9, 0.1, 0.3)), 0.7, 'step 0'),
    (lambda path: of_schedule(path, lambda step: jnp.where(step > 9, 0.1, 1.0)), 0.0, 'step 0'),
  )  # fmt: skip
  @pytest.mark.few
  def test_links_that_come_and_go_have_the_zeros_of_their_density(self, make, pruned, when):
    f, params, x = example()
    checked = bound_check(make('.*'), f, params, x)
    self.assertTrue(checked.ok, checked)
    sizes = [params[w.path].size for w in checked.weights]
    found = np.average([w.pruned for w in checked.weights], weights=sizes)
    self.assertAlmostEqual(found, pruned, delta=1 / min(sizes))
    reached = [w.reached for w in checked.weights]
    self.assertEqual(reached, [None] * 2) if not pruned else self.assertGreater(min(reached), 0.4)
    self.assertRegex(str(checked), rf'\npruned entries are held at .* are those of {when}\. Here: out, query\n')

  def test_links_that_come_and_go_are_to_be_trained(self):
    f, params, x = example()
    recipe = s24.recipes.static('.*', density=0.2)
    frozen = s24.check(recipe, lambda p, x: f(jax.lax.stop_gradient(p), x), params, x)
    self.assertIn('no gradient reaches it at all: it is frozen', str(frozen))

  def test_the_table_tells_which_gradients_are_sampled(self):
    recipe = s24.recipes.s_ste('up|down', fp8='e4m3').with_exact_gradients('down')
    params = {'up': jax.ShapeDtypeStruct((16, 32), jnp.float32), 'down': jax.ShapeDtypeStruct((32, 16), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    table = str(s24.check(recipe, lambda p, x: jax.nn.gelu(x @ p['up']) @ p['down'], params, x))
    self.assertRegex(table, r'\ndown .* soft_threshold, fp8_e4m3  .*\nup .* soft_threshold, fp8_e4m3, mvue  ')

  @parameterized.parameters(
    (s24.recipes.mixed_sparsity('.*', total_steps=4000), 'density 1 -> 0.09 -> 1'),
    (s24.recipes.mixed_sparsity('.*', total_steps=4000, restoration=0.0, structure='2:4'), '2:4 density 0.5 -> 0.09'),
    (s24.recipes.rigl('.*', density=0.2, total_steps=400), 'density 0.2'),
    (of_schedule('.*', lambda step: 0.1), 'density by a schedule'),
  )
  def test_the_table_tells_a_density_in_short(self, recipe, policy):
    f, *given = shapes()
    (weight, *_), bound = given[0], s24.bind(recipe, f, *given)
    with self.assertLogs('sparse24_jax', 'INFO') as logged:
      _dispatch.log_once.cache_clear()
      jax.eval_shape(s24.sparse_training(optax.sgd(0.1), bound, phase='sparse').init, given[0])
    for table in (str(s24.check(bound, f, *given)), logged.output[0]):
      self.assertRegex(table, rf'\n *{weight} .*  dynamic_sparse {policy}(  .*)?\n')

  def test_a_mistyped_alternative_is_told(self):
    checked = s24.check(s24.recipes.ste('que?ry|outt'), *shapes())
    self.assertRegex(str(checked), r"\nWARNING  'outt' in the rule 'que\?ry\|outt' matches no .*did you mean 'out'\?")
    self.assertEqual(checked.dense, ('out',))

  def test_sentences_have_a_width_and_tables_do_not(self):
    checked = s24.Checked((s24.CheckedWeight('w', (8, 8), None, 'w: no word here is long ' * 4),), ('head',) * 20)
    table, *lines = checked.text(60).splitlines()
    self.assertGreater(len(table), 60)
    self.assertLessEqual(max(map(len, lines)), 60)
    self.assertEqual([line[:9].strip() for line in lines[:2]], ['PROBLEM', ''])
    self.assertEqual(' '.join(map(str.strip, lines)), ' '.join(map(str.strip, str(checked).splitlines()[1:])))

  @pytest.mark.slow
  def test_layers_and_gates_that_start_at_zero_are_learnt(self):
    f, params, x = example()
    gated = lambda p, x: p['gate'] * f(p, x)  # noqa: E731
    zeros = params | {'out': 0 * params['out'], 'query': 0 * params['query']}
    for make, function, given in (
      (s24.recipes.s_ste, f, zeros), (s24.recipes.ste, gated, params | {'gate': jnp.zeros((1, 1))}),
    ):  # fmt: skip
      checked = bound_check(make('query|out'), function, given, x)
      self.assertTrue(checked.ok, checked)
      self.assertGreater(min(w.reached for w in checked.weights), 0.4)
    self.assertRegex(str(s24.check(s24.recipes.ste('.*'), f, params, 0 * x)), 'these arguments .*: give such as in tr')

  def test_parameters_of_16_bits(self):
    shapes = {'w': jax.ShapeDtypeStruct((16, 8), 'bfloat16'), 'v': jax.ShapeDtypeStruct((16, 8), 'float32')}
    f = lambda p, x: x @ p['w'] + x @ p['v']  # noqa: E731
    checked = s24.check(s24.recipes.ste('.*'), f, shapes, jax.ShapeDtypeStruct((4, 16), 'float32'))
    self.assertRegex(str(checked), r'parameters of 16 bits: .* Keep parameters in float32 .*\. Here: w\n')
    self.assertTrue(checked.ok)

  @pytest.mark.slow
  def test_a_search_for_leaks_finds_none(self):
    with jax.checking_leaks():
      self.assertTrue(bound_check(s24.recipes.ste('.*'), *example()).ok)

  def test_shapes_are_enough_for_the_axes(self):
    f, *given = example()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    checked = s24.check(s24.recipes.ste('query'), f, *shapes)
    self.assertEqual([w.weight.layout.describe() for w in checked.weights], ['in 0, out 1 2'])
    self.assertEqual((checked.dense, checked.weights[0].pruned), (('out',), None))
    self.assertNotIn('share of', str(checked))

  def test_every_problem_is_listed(self):
    params = {'w': shape(16, 8), 'v': shape(6, 8), 'fine': shape(8, 8)}
    f = lambda p, x: (x @ jnp.sin(p['w']) + x[:, :6] @ p['v']) @ p['fine']  # noqa: E731
    checked = s24.check(s24.recipes.ste('.*'), f, params, shape(4, 16))
    self.assertFalse(checked.ok)
    self.assertEqual([w.problem is None for w in checked.weights], [True, False, False])
    problems = r"(?s)PROBLEM  v of shape .* length 6 along axis -2.*leave it dense: recipe.with_dense\('v'\)"
    self.assertRegex(str(checked), problems + '.*PROBLEM  w of shape.*sin at')

  def test_a_problem_of_one_weight_hides_nothing_of_the_others(self):
    params = {'w': gaussian(0, (16, 8)), 'v': jnp.ones((16, 8)), 'table': jnp.int8([[1]])}
    f = lambda p, x: x @ p['w'] + x @ jnp.sin(p['v'])  # noqa: E731
    checked = s24.check(s24.recipes.ste('.*'), f, params, jnp.ones((4, 16)))
    found = [(w.path, w.pruned, w.problem is None) for w in checked.weights]
    self.assertEqual(found, [('table', None, False), ('v', None, False), ('w', 0.5, True)])
    # The message says what to write, and that is taken.
    self.assertIn("recipe.with_dense('v')", str(checked))
    mended = s24.check(s24.recipes.ste('.*').with_dense('v', 'table'), f, params, jnp.ones((4, 16)))
    self.assertEqual((mended.ok, mended.dense), (True, ('table', 'v')))
    self.assertRegex(str(mended), '(?s)block -: a layer by itself.*stay dense: table, v')

  @pytest.mark.slow
  def test_a_matmul_that_a_run_refuses_is_a_problem_of_its_weight(self):
    params = {name: gaussian(i, (16, 16)) for i, name in enumerate(('a', 'b', 'c'))}

    def f(p, x):
      return jnp.tanh(jnp.tanh(x @ p['a']).mean(1) @ p['b']) @ p['c']

    checked = s24.check(s24.recipes.s_ste('.*'), f, params, jnp.ones((2, 8, 16)))
    self.assertEqual([(w.path, w.pruned) for w in checked.weights], [('a', 0.5), ('b', None), ('c', None)])
    self.assertRegex(str(checked), 'PROBLEM  b: .* has 2 tokens.*\nPROBLEM  c: .* has 2 tokens')

  @parameterized.parameters(False, True)
  @pytest.mark.few
  def test_a_down_projection_has_its_zeros_along_its_outputs(self, transposed):
    turn = jnp.transpose if transposed else lambda w: w
    params = {'up': turn(gaussian(0, (16, 64))), 'down': turn(gaussian(1, (64, 16)))}

    def f(p, x):
      return jnp.square(jax.nn.relu(x @ turn(p['up']))) @ turn(p['down'])

    recipe = s24.recipes.neuron_level('up', 'down', policy=s24.ActivationPolicy(s24.VNM(16, 8)))
    checked = bound_check(recipe, f, params, gaussian(2, (64, 16)))
    self.assertTrue(checked.ok, checked)
    self.assertEqual([w.pruned for w in checked.weights], [0.5, 0.5])
    with jax.default_matmul_precision('highest'):  # what such a block does not give is a problem of both
      refused = s24.check(recipe, f, params, gaussian(2, (64, 16)))
    self.assertRegex(str(refused), '(?s)PROBLEM  (up, down|down, up): precision=(?!.*PROBLEM)')

  def test_modules_in_place_of_a_function(self):
    x = jnp.ones((4, 16))
    params = nn.Dense(8).init(jax.random.key(0), x)['params']
    self.assertEqual(s24.check(s24.recipes.ste('kernel'), nn.Dense(8), params, x).weights[0].pruned, 0.5)
    for model in (nn.Dense(8), s24.sparsify(nn.Dense(8), s24.recipes.ste('kernel'))):
      self.assertEqual(s24.bind(s24.recipes.ste('kernel'), model, params, x)['kernel'].uses[0].tokens, 4)
    for take in (s24.check, s24.bind):
      # An Equinox model holds functions beside its arrays.
      with self.assertRaisesRegex(ValueError, r"found others at activation \(\w+\). Equinox: .* eqx.partition\(model"):
        take(s24.recipes.ste('w'), lambda p, x: x @ p['w'], {'w': jnp.ones((16, 8)), 'activation': jax.nn.relu}, x)
      with self.assertRaisesRegex(ValueError, r'f is an nnx module, Linear, .* lambda model, x: model\(x\), model, x'):
        take(s24.recipes.ste('.*'), nnx.Linear(16, 8, rngs=nnx.Rngs(0)), params, x)
      with self.assertRaisesRegex(ValueError, 'f must be a function of parameters or a linen module, found dict'):
        take(s24.recipes.ste('.*'), params, params, x)

  def test_arguments_in_another_order(self):
    params, batch, recipe = {'w': jnp.ones((16, 8))}, {'x': jnp.ones((4, 16))}, s24.recipes.ste('w')

    def f(params, batch):
      return batch['x'] @ params['w']

    for take in (s24.check, s24.bind):
      order = rf'{take.__name__}\(recipe, f, params, \*args\)'
      with self.assertRaisesRegex(ValueError, rf'found function: arguments in another order\? It is {order}'):
        take(f, recipe)
      with self.assertRaisesRegex(ValueError, f'^params not given: {order}'):
        take(recipe, f)
      for first in (batch, batch['x']):  # in which f finds no key, and no text is an index
        with self.assertRaisesRegex(ValueError, rf'not in params, but in an argument behind it: .* It is {order}'):
          take(recipe, f, first, params)
      # An error of the function that has nothing to do with the order stays as it is.
      with self.assertRaises(KeyError):
        take(recipe, f, params, {'y': batch['x']})

  def test_dense_weights_of_a_bound_recipe(self):
    f, params, x = example()
    bound = s24.bind(s24.recipes.ste('.*'), f, params, x).with_dense('out')
    self.assertEqual([weight.path for weight in bound.weights], ['query'])
    state = s24.sparse_training(optax.sgd(0.1), bound).init(params)
    self.assertEqual({'query', 'out'} & set(s24.sparse_variables(params, state, bound)), {'query'})

  def test_masks_are_those_of_the_weights_that_the_chain_leaves(self):
    f, params, x = example()
    recipe = s24.recipes.ste('.*')
    bound = s24.bind(recipe, f, params, x)
    right = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.sgd(0.5), bound))
    scaled_after = optax.chain(s24.sparse_training(optax.scale_by_adam(), bound), optax.scale(-3e-4))
    self.assertTrue(s24.check(recipe, f, params, x, optimizer=right).ok)
    wrong = s24.check(recipe, f, params, x, optimizer=scaled_after)
    self.assertEqual([w.problem is None for w in wrong.weights], [False, False])
    self.assertRegex(str(wrong), 'query: the weights after step 0 differ from those the masks were chosen from: ')
    with self.assertRaisesRegex(ValueError, 'out: optimizer makes it sparse, recipe does not'):
      s24.check(s24.recipes.ste('query'), f, params, x, optimizer=scaled_after)

  @pytest.mark.slow
  def test_an_optimizer_that_reads_the_loss(self):
    """Or does not take it, as SAM."""
    recipe, params, x = s24.recipes.ste('w'), {'w': gaussian(0, (16, 8))}, gaussian(1, (4, 16))
    by_loss = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    for optimizer, ok in ((optax.MultiSteps(s24.sparse_training(by_loss, recipe), 2), True),
                          (s24.sparse_training(sam, recipe), True),
                          (optax.chain(s24.sparse_training(by_loss, recipe), optax.scale(0.5)), False)):  # fmt: skip
      self.assertEqual(s24.check(recipe, lambda p, x: x @ p['w'], params, x, optimizer=optimizer).ok, ok)

  def test_notes_of_clips_are_shown_and_logged(self):
    f, params, x = example()
    recipe = s24.bind(s24.recipes.ste('.*'), f, params, x)
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    tried = try_chain(tx, params)._replace(clipped='out')
    with mock.patch.object(check_module, 'try_chain', return_value=tried), self.assertLogs('sparse24_jax') as logs:
      checked = s24.check(recipe, f, params, x, optimizer=tx)
    self.assertTrue(checked.ok)
    self.assertRegex(repr(checked), r'\nWARNING  out: masked decay')
    self.assertIn('out: masked decay', '\n'.join(logs.output))

  @pytest.mark.slow
  def test_a_clip_on_the_wrong_side(self):
    """It belongs in front where gradients have the decay, inside where links come and go."""
    f, params, x = example()
    clip = optax.clip_by_global_norm(1.0)
    decayed = s24.bind(dataclasses.replace(s24.recipes.ste('.*'), masked_decay=1e-4), f, params, x)
    rigl = s24.bind(s24.recipes.rigl('.*', density=0.5, total_steps=9, refresh_every=3), f, params, x)
    for recipe, told in (
      (decayed, r'masked decay.* inside .*put it outside, optax.chain\(clip'),
      (rigl, 'its gradient where it has no links.* in front .*put it inside, sparse_tr'),
    ):
      inside = s24.sparse_training(optax.chain(clip, optax.sgd(0.1)), recipe)
      in_front = optax.chain(clip, s24.sparse_training(optax.sgd(0.1), recipe))
      for tx, wrong in ((inside, recipe is decayed), (in_front, recipe is rigl)):
        checked = s24.check(recipe, f, params, x, optimizer=tx)
        self.assertTrue(checked.ok)  # DoG, say, looks the same
        self.assertLen(checked.notes, wrong)
        if wrong:
          self.assertRegex(str(checked), rf'\nWARNING  out: {told}')

  def test_an_optimizer_whose_recipe_is_not_bound(self):
    recipe, params, x = s24.recipes.ste('w'), {'w': gaussian(0, (8, 16))}, gaussian(1, (4, 16))

    def f(p, x):
      return x @ p['w'].T

    bound = s24.bind(recipe, f, params, x)
    taken = r'PROBLEM  w of .* it as in 1, out 0, and the optimizer .* in 0, out 1\. .*bind'
    for given, inner, of in (
      (recipe, optax.sgd(0.1), recipe), (bound, optax.sgd(0.1), recipe), (recipe, optax.set_to_zero(), recipe),
      (recipe, optax.sgd(0.1), bound),
    ):  # fmt: skip
      tx = optax.chain(s24.sparse_training(inner, of), optax.scale(1.0 if of is bound else 0.5))
      checked = s24.check(given, f, params, x, optimizer=tx)
      self.assertEqual(checked.ok, of is bound)
      (self.assertNotRegex if checked.ok else self.assertRegex)(str(checked), taken)
      self.assertEmpty(checked.notes)
    told = 'not stored as [stacked..., in, out]: w. Give sparse_training'
    for of in (recipe, bound):
      checked = s24.check(of, f, params, x)
      self.assertEqual((checked.ok, told in str(checked)), (of is bound, of is recipe))

  def test_an_optimizer_whose_recipe_leaves_a_weight_dense(self):
    f, params, x = example()
    for recipe in (s24.recipes.ste('.*'), s24.bind(s24.recipes.ste('.*'), f, params, x)):
      tx = s24.sparse_training(optax.sgd(0.1), s24.bind(s24.recipes.ste('.*').with_dense('query'), f, params, x))
      problems = [w.problem for w in s24.check(recipe, f, params, x, optimizer=tx).weights]
      self.assertEqual(problems, [None, 'query: recipe makes it sparse, optimizer does not: give both the same recipe'])

  @pytest.mark.slow
  def test_a_weight_that_the_optimizer_never_updates(self):
    f, params, x = example()
    recipe = s24.bind(s24.recipes.ste('.*'), f, params, x)
    labels = {'query': 'frozen', 'out': 'train'}
    # The rate is zero in the first step that is tried.
    train = optax.sgd(optax.linear_schedule(0.0, 1e-2, 50))
    frozen = optax.multi_transform({'train': train, 'frozen': optax.set_to_zero()}, labels)
    checked = s24.check(recipe, f, params, x, optimizer=s24.sparse_training(frozen, recipe))
    problems = {w.path: w.problem for w in checked.weights}
    self.assertIsNone(problems['out'])
    self.assertStartsWith(problems['query'], 'query: not trained by the optimizer, and pruned: leave it dense with')
    self.assertIn("recipe.with_dense('query')", problems['query'])

  def test_the_command_breaks_sentences_in_a_terminal_alone(self):
    for columns, in_a_terminal, longest in (('60', True, 60), ('60', False, None), ('9', True, 40)):
      with mock.patch.dict('os.environ', COLUMNS=columns), contextlib.redirect_stdout(io.StringIO()) as out, \
           mock.patch.object(out, 'isatty', return_value=in_a_terminal):  # fmt: skip
        main(['check', f'{__name__}:unreadable'])
        checked = s24.check(s24.recipes.transposable_srste('.*', masked_decay=0.0), *unreadable())
        self.assertEqual(str(checked), checked.text())  # whatever the terminal
      self.assertStartsWith(out.getvalue(), checked.text(longest))

  def test_command(self):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      self.assertEqual(main(['check', f'{__name__}:example', '--dense', 'out', '--recipe', 'ste']), 0)
      self.assertEqual(main(['check', f'{__name__}:unreadable']), 1)
    self.assertRegex(out.getvalue(), r'(?s)query +16 x 2 x 8 +in 0, out 1 2 .*dense: out; arrays .*PROBLEM  w of shape')
    self.assertEndsWith(out.getvalue(), 'to leave these dense here: --dense w\n')

  @parameterized.parameters(
    ('no_such_module:example', (), "'no_such_module:example' is no MODULE:FUNCTION: ModuleNotFoundError"),
    ('folder/no_such.py:example', (), r"No module named .*\. Did you mean folder\.no_such:example\?"),
    (f'{__name__}:without_args', (), r'missing 1 required .*without_args\(\) must return \(f, params, \*args\), with'),
    (f'{__name__}:params_later', (), r'f must take the parameters first; wrap it: lambda p, \*a: f\(\*a, params=p\)'),
    (f'{__name__}:no_such_function', (), 'is no MODULE:FUNCTION: AttributeError'),
    (f'{__name__}:arguments', (), r'arguments\(\) raised TypeError: '),
    (f'{__name__}:absltest.main', (), 'is no MODULE:FUNCTION'),
    ('builtins:dict', (), r'dict\(\) must return \(f, params, \*args\), found dict'),
    (f'{__name__}:example', ('--path', ''), "error: rule '' of recipe 'transposable_srste' decides for no weight"),
    (f'{__name__}:example', ('--path', '('), "error: rule path '\\(' is not a regular expression"),
    (f'{__name__}:example', ('--down', '.*'), '--down is for neuron_level'),
    (f'{__name__}:example', ('--recipe', 'neuron_level'), 'neuron_level needs --down'),
    (f'{__name__}:example', ('--recipe', 'fst'), r"invalid choice: 'fst' .*did you mean 'transposable_srste'\?"),
    ('ex', (), "'ex' names no function: write ex:FUNCTION"),
  )
  def test_what_the_command_cannot_use_is_a_line(self, name, options, message):
    err = io.StringIO()
    with self.assertRaises(SystemExit) as end, contextlib.redirect_stderr(err):
      main(['check', name, *options])
    self.assertEqual(end.exception.code, 2)
    self.assertRegex(err.getvalue(), message)

  def test_takes_every_recipe(self):
    for name, known in s24.recipes.KNOWN.items():
      with contextlib.redirect_stdout(io.StringIO()) as out:
        down = ['--path', 'query', '--down', 'out'] if len(known.paths) > 1 else ['--path', 'query|out']
        status = main(['check', f'{__name__}:shapes', '--recipe', name, *down])
      # Of two projections with no squared ReLU between them no block can be made.
      self.assertEqual((status, 'PROBLEM' in out.getvalue()), (1, True) if name == 'neuron_level' else (0, False), name)


if __name__ == '__main__':
  absltest.main()
