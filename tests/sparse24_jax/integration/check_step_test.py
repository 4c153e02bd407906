"""`check_step`: a step that trains dense while its optimizer prunes is an error, by weight and line; others pass."""

import functools
import inspect
import re

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels._dispatch import log_once
import sparse24_jax as s24
from tests.draws import parameters
from tests.standard import project

RECIPES = {
  'ste': s24.recipes.ste('.*'),
  'fst': s24.recipes.transposable_srste('.*', masked_decay=1e-3),
  's_ste': s24.recipes.s_ste('.*'),
  's_ste_fp8': s24.recipes.s_ste('.*', fp8=True),
  'rigl': s24.recipes.rigl('.*', density=0.5, total_steps=1000),
  'packed': s24.Recipe('own', (s24.Rule('.*', s24.DotPolicy(s24.transposable(), 'sparse', implementation='dense')),)),
}
X = np.ones((8, 16), np.float32)


def params_of(layers=3):
  rng = np.random.default_rng(0)
  return {name: np.float32(rng.normal(size=(layers, 16, 16))) for name in ('up', 'down')}


def loss(params, x):
  """Layers in a scan, with a remat: a block and what is around it."""

  @jax.checkpoint
  def layer(x, w):
    return x + jax.nn.gelu(x @ w['up']) @ w['down'], None

  return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


def step_of(recipe, how, loss=loss, phase=None):
  """(step, optimizer) that applies the sparse loss, `project`, the plain one, or one that forgets a weight's mask."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adamw(1e-3), recipe, phase=phase))

  def of(params, state, x):
    match how:
      case 'sparsify':
        return s24.sparsify(loss, recipe)(params, s24.sparse_variables(params, state, recipe), jax.random.key(0), x)
      case 'project':
        return loss(project(params, state, recipe), x)
      case 'plain':
        return loss(params, x)
      case 'half':
        return loss(project(params, state, recipe) | {'up': params['up']}, x)
      case 'elsewhere':
        return loss({'up': jnp.ones_like(params['up']), 'down': jnp.sin(params['down'])}, x)

  def step(params, state, x):
    grads = jax.grad(of)(params, state, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step, tx


def checked(recipe, how, wrap=lambda step: step, phase=None):
  step, tx = step_of(recipe, how, phase=phase)
  given = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params_of(), X))  # kernels take 16 bits
  params, x = jax.eval_shape(lambda: given)
  return s24.check_step(wrap(step), params, jax.eval_shape(tx.init, params), x)


def steps_in_a_scan(step):
  def steps(params, state, x):
    return jax.lax.scan(lambda carry, x: (step(*carry, x), None), (params, state), jnp.stack([x] * 4))[0]

  return jax.jit(steps, donate_argnums=(0, 1))


def square(params, x):
  return ((x @ params['w']) ** 2).mean()


def check_of(made, *, optimizer=None, around=lambda tx: tx, before=lambda params: params, update=True, wrt=0):
  """`check_step` of one weight and its average, whose step has the loss and the metric that `made(sparse)` returns.

  Both are `f(params, average)`, of functions of parameters; `before` makes of the parameters those of the update.
  """
  recipe = s24.recipes.ste('w')
  tx = around(s24.sparse_training(optimizer or optax.sgd(0.1), recipe))
  params = {'w': np.asarray(params_of()['up'])[0]}

  def step(params, average, state, x):
    def sparse(params, f=square):
      return s24.sparsify(f, recipe)(params, s24.sparse_variables(params, state, recipe), None, x)

    loss, metric = made(sparse)
    grads = jax.grad(loss, wrt)(params, average)
    updates = tx.update(grads, state, before(params))[0] if update else grads
    return optax.apply_updates(params, updates), metric(params, average)

  return s24.check_step(step, params, params, jax.eval_shape(tx.init, params), X)


def sparse_alone(sparse):
  return lambda params, _: sparse(params), lambda *_: 0


class CheckStepTest(parameterized.TestCase):

  @parameterized.parameters('fst', 's_ste_fp8', 'packed', 'ste', 's_ste', 'rigl')
  @pytest.mark.few(2)
  def test_sparse_steps_pass_and_plain_ones_do_not(self, name):
    ways = ('sparsify', 'project') if name in ('fst', 's_ste') else ('sparsify',)
    for how in ways:
      self.assertEqual(set(checked(RECIPES[name], how).weights), {'up', 'down'})
    with self.assertRaises(ValueError) as error:
      checked(RECIPES[name], 'plain')
    lines, start = str(error.exception).splitlines(), inspect.getsourcelines(loss)[1]
    self.assertEqual([line.partition(':')[0] for line in lines[:2]], ['down', 'up'])
    self.assertRegex(lines[0], rf'the step reads it dense at \S*check_step_test.py:{start + 5}\b')
    self.assertRegex(lines[2], '^Apply what sparsify returned, with')  # once
    self.assertLen(lines, 3)

  def test_under_the_check_for_leaked_tracers(self):
    with jax.checking_leaks():
      self.assertLen(checked(s24.recipes.ste('up|down'), 'sparsify').weights, 2)

  def test_a_matmul_in_functions_of_jax_alone_has_the_line_of_their_call(self):
    def f(p, x):
      return jax.lax.scan(lambda x, w: (jax.jit(jnp.dot)(x, w), None), x, p['up'])[0].sum()

    step, tx = step_of(s24.recipes.ste('up'), 'plain', loss=f)
    with self.assertRaisesRegex(ValueError, rf'dense at \S*check_step_test.py:{inspect.getsourcelines(f)[1] + 1}\b'):
      s24.check_step(step, params_of(), tx.init(params_of()), X)

  def test_a_dense_end_reads_weights_dense_by_design(self):
    """So a loop may check the step of each phase, and that of its dense rival."""
    watching, alone = s24.recipes.dense('.*', watch=s24.magnitude()), s24.recipes.dense()
    for recipe, phase in ((RECIPES['fst'], 'dense'), (watching, 'dense'), (watching, None), (alone, None)):
      log_once.cache_clear()  # a process says it once
      with self.assertLogs('sparse24_jax', 'WARNING') as logs:
        found = checked(recipe, 'plain', phase=phase)
      self.assertEqual((found.phase, set(found.weights)), ('dense', set() if recipe is alone else {'up', 'down'}))
      text = str(found)
      self.assertStartsWith(text, "phase 'dense': the step trains dense, and no mask")
      self.assertLen(re.findall(r'\n(?:up|down): dense at \S*check_step_test.py', text), len(found.weights))
      self.assertEqual(logs.records[-1].getMessage(), f'check_step: {found}')

  @parameterized.parameters('variables of the weights', 'project of the weights', 'project of the state')
  @pytest.mark.few(2)
  def test_a_dense_phase_that_goes_on_sparse(self, how):
    recipe, given = RECIPES['fst'], params_of()
    tx, sparse = s24.sparse_training(optax.adam(1e-3), recipe, phase='dense'), s24.sparsify(loss, recipe)

    def of(params, state, x):
      if how == 'variables of the weights':
        return sparse(params, s24.sparse_variables(params, None, recipe), jax.random.key(0), x)
      kept = state if how == 'project of the state' else None
      return loss(s24.project(params, kept, s24.bind(recipe, loss, params, x), phase='sparse'), x)

    def step(params, state, x):
      updates, state = tx.update(jax.grad(of)(params, state, x), state, params)
      return optax.apply_updates(params, updates), state

    line = inspect.getsourcelines(loss)[1] + 5
    with self.assertRaisesRegex(
      ValueError,
      rf"(?s)^down(, up)?: the step updates in phase 'dense', and reads it sparse at \S*check_step_test.py:{line}\b.*\n"
      "give sparsify, sparse_variables and project the phase of the optimizer, phase='dense'; an nnx model",
    ):
      s24.check_step(step, given, jax.eval_shape(tx.init, given), X)

  def test_the_line_is_of_the_model_that_is_checked_where_another_has_layers_alike(self):
    """An op is traced once for both, with the lines of the first."""
    recipe, given = RECIPES['fst'], {'up': np.ones((16, 16), np.float32)}
    tx = s24.sparse_training(optax.adam(1e-3), recipe, phase='dense')

    def first(params, x):
      return ((x @ params['up']) ** 2).mean()

    def second(params, x):
      return ((x @ params['up']) ** 2).mean()

    for model in (first, second):
      sparse = s24.sparsify(model, recipe)

      def step(params, state, x, sparse=sparse):
        variables = s24.sparse_variables(params, None, recipe)
        updates, state = tx.update(jax.grad(sparse)(params, variables, jax.random.key(0), x), state, params)
        return optax.apply_updates(params, updates), state

      with self.assertRaisesRegex(ValueError, rf'check_step_test.py:{inspect.getsourcelines(model)[1] + 1}\b'):
        s24.check_step(step, given, jax.eval_shape(tx.init, given), X)

  def test_both_phases_in_one_program(self):
    """By branches; a metric of the sparse model in the dense one does not count, its gradient does."""
    params = {'w': params_of()['up'][0]}
    recipe = s24.bind(s24.recipes.transposable_srste('w', masked_decay=1e-3), square, params, X)
    txs = {phase: s24.sparse_training(optax.sgd(0.1), recipe, phase=phase) for phase in s24.recipe.PHASES}

    def in_phase(phase, trains, params, state, x):
      def sparse(params):
        return square(s24.project(params, None if phase == 'dense' else state, recipe, phase='sparse'), x)

      of = sparse if trains == 'sparse' else functools.partial(square, x=x)
      updates, after = txs[phase].update(jax.grad(of)(params), state, params)
      return optax.apply_updates(params, updates), after, sparse(params)

    def step(params, state, x, is_sparse, trains):
      branches = (functools.partial(in_phase, 'sparse', 'sparse'), functools.partial(in_phase, 'dense', trains))
      return jax.lax.cond(is_sparse, *branches, params, state, x)

    given = params, jax.eval_shape(txs['sparse'].init, params), X, np.bool_(True)
    found = s24.check_step(functools.partial(step, trains='dense'), *given)
    self.assertEqual((found.phase, list(found.weights)), ('sparse', ['w']))
    with self.assertRaisesRegex(ValueError, "^w: the step updates in phase 'dense', and reads it sparse at"):
      s24.check_step(functools.partial(step, trains='sparse'), *given)

  @parameterized.product(phase=s24.recipe.PHASES, implementation=(None, 'dense'))
  def test_a_rule_in_fp8_is_read_in_fp8(self, phase, implementation):
    """Simulated, and rounded as kernels do; the plain model and a recipe in 16 bits are errors."""

    def recipe_of(precision):
      policy = s24.DotPolicy(s24.transposable(), 'sparse', precision=precision, implementation=implementation)
      rules = s24.Rule('up', policy), s24.Rule('down', s24.DotPolicy(s24.magnitude()))
      return s24.Recipe('own', rules, phases=(s24.Phase('sparse', 0.9), s24.Phase('dense', 0.1)))

    recipe, wide = recipe_of('fp8'), recipe_of('default')
    params, x = jax.eval_shape(lambda: jax.tree.map(jnp.bfloat16, (params_of(), X)))
    tx = s24.sparse_training(optax.adam(1e-3), recipe, phase=phase)

    def step(params, state, x, run):
      def of(params):
        if run is None:
          return loss(params, x)
        # The states alone: the variables would not be read by another recipe.
        variables = s24.states_of(s24.sparse_variables(params, state, recipe, phase=phase))
        return s24.sparsify(loss, run, phase=phase)(params, variables, None, x)

      updates, state = tx.update(jax.grad(of)(params), state, params)
      return optax.apply_updates(params, updates), state

    def check(run):
      return s24.check_step(functools.partial(step, run=run), params, jax.eval_shape(tx.init, params), x)

    found = check(recipe)
    self.assertEqual((found.phase, found.fp8), (phase, {'up'}))
    self.assertRegex(str(found), rf'(?s)\bdown: {phase} at.*\bup: {phase}, fp8 at')
    advice = 'recipe of the optimizer' if phase == 'sparse' else "sparsify.model, recipe, phase='dense'. with"
    for run in (wide,) if phase == 'sparse' else (wide, None):
      with self.assertRaisesRegex(
        ValueError, rf"^up: its rule has it in FP8, .* reads it {phase}, but not in FP8, at .*\n.* {advice}"
      ):
        check(run)

  def test_a_recipe_without_masks_shows_nothing(self):
    """But in a dense phase; nor does the step of a dense recipe that makes no update."""
    fp8 = s24.Recipe('own', (s24.Rule('.*', s24.DotPolicy(precision='fp8')),))
    policy = s24.ActivationPolicy(s24.VNM(16, 8), s24.TwoOfFour(), dense_features=0.0, sparse_weights=False)
    neurons = s24.recipes.neuron_level('up', 'down', policy=policy)
    for recipe, phase in ((fp8, None), (neurons, 'sparse')):
      for how in ('plain', 'sparsify') if recipe is fp8 else ('plain',):
        with self.assertRaisesRegex(ValueError, 'this recipe keeps no masks, so that .* cannot see .* use check'):
          checked(recipe, how, phase=phase)
    self.assertEqual(checked(neurons, 'plain', phase='dense').phase, 'dense')
    with self.assertRaisesRegex(ValueError, 'A step of a dense phase passes if it has its update'):
      checked(s24.recipes.dense(), 'plain', wrap=lambda step: lambda params, state, x: (params, state))

  @parameterized.parameters(jax.jit, steps_in_a_scan)
  def test_what_the_loop_calls_is_looked_into(self, wrap):
    checked(RECIPES['fst'], 'sparsify', wrap)
    with self.assertRaisesRegex(ValueError, '^down: the step reads it dense'):
      checked(RECIPES['fst'], 'plain', wrap)

  def test_each_step_of_a_python_loop(self):
    recipe = RECIPES['ste']
    (sparse, tx), (plain, _) = step_of(recipe, 'sparsify'), step_of(recipe, 'plain')
    params = jax.eval_shape(params_of)

    def steps(params, state, x, *, each):
      for step in each:
        params, state = step(params, state, x)
      return params, state

    state = jax.eval_shape(tx.init, params)
    twice = s24.check_step(functools.partial(steps, each=(sparse,) * 2), params, state, X)
    self.assertEqual(twice, s24.check_step(sparse, params, state, X))
    with self.assertRaisesRegex(ValueError, '^down: in update 2 of 2, the step reads it dense at .*\nup: in update 2'):
      s24.check_step(jax.jit(functools.partial(steps, each=(sparse, plain))), params, state, X)

  @parameterized.product(name=('ste', 's_ste', 'packed'), gathered=(False, True))
  @pytest.mark.few(3)
  def test_masks_that_are_made_once_before_a_python_loop(self, name, gathered):
    """Stale in its second step; right where steps are micro-batches of one update."""
    recipe = RECIPES[name]
    tx = s24.sparse_training(optax.adamw(1e-3), recipe)
    tx = optax.MultiSteps(tx, 2) if gathered else tx
    sparse = s24.sparsify(loss, recipe)

    def steps(params, state, x, *, once):
      for i in range(2):
        if not i or not once:
          variables = s24.sparse_variables(params, state, recipe)
        updates, state = tx.update(jax.grad(sparse)(params, variables, jax.random.key(i), x), state, params)
        params = optax.apply_updates(params, updates)
      return params, state

    given = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params_of(), X))
    params, x = jax.eval_shape(lambda: given)
    check = functools.partial(s24.check_step, params=params, state=jax.eval_shape(tx.init, params), x=x)
    check(functools.partial(steps, once=False))
    if gathered:
      check(functools.partial(steps, once=True))
    else:
      with self.assertRaisesRegex(ValueError, '^down, up: in update 2 of 2, at .* under the mask of an update before'):
        check(functools.partial(steps, once=True))

  def test_one_weight_of_two(self):
    with self.assertRaises(ValueError) as error:
      checked(RECIPES['fst'], 'half')
    self.assertRegex(str(error.exception), '^up: the step reads it dense at')
    self.assertNotIn('down', str(error.exception).partition(' at ')[0])
    with self.assertRaisesRegex(ValueError, '^down: the step reads it dense'):
      checked(RECIPES['fst'], 'elsewhere')

  def test_a_loss_of_one_of_several_tasks(self):
    """Reads the trunk and its own head; one that reads nothing is none, nor one that is given other parameters."""
    params = {name: np.eye(16, dtype=np.float32) for name in ('trunk', 'a', 'b')}
    recipe = s24.recipes.ste('.*')
    tx = s24.sparse_training(optax.adam(0.1), recipe)

    def step(params, state, x, *, heads, dense=False, of=lambda params: params):
      for head in heads:

        def loss(params, x, head=head):
          return (jnp.tanh(x @ params['trunk']) @ params[head]).mean()

        def sparse(given, state=state, params=params, loss=loss):
          if dense:
            return loss(of(given), x)
          return s24.sparsify(loss, recipe)(of(given), s24.sparse_variables(params, state, recipe), None, x)

        updates, state = tx.update(jax.grad(sparse)(params), state, params)
        params = optax.apply_updates(params, updates)
      return params, state

    def check(**how):
      log_once.cache_clear()  # a process says it once
      return s24.check_step(functools.partial(step, **how), params, tx.init(params), X)

    with self.assertLogs('sparse24_jax', 'WARNING') as logs:
      found = check(heads='a')
    self.assertEqual(found.weights['b'], ())
    note = 'b: no matmul of the step reads it, and its gradient is not computed from it: right if its loss is'
    self.assertStartsWith(logs.records[0].getMessage(), note)
    self.assertIn(note, str(found))
    for heads in ('ab', 'aba'):
      self.assertTrue(all(check(heads=heads).weights.values()))
    with self.assertRaisesRegex(ValueError, '^a: the step reads it dense'):
      check(heads='a', dense=True)
    for dense in (False, True):
      with self.assertRaisesRegex(ValueError, '^a, b, trunk: no matmul of the step reads it, .* holds for all weights'):
        check(heads='a', dense=dense, of=lambda _: params)

  def test_a_masks_argument_that_was_made_before(self):
    recipe = RECIPES['ste']
    params, tx = params_of(), s24.sparse_training(optax.sgd(0.1), recipe)
    sparse = s24.sparsify(loss, recipe)

    def step(params, state, variables, x):
      updates, state = tx.update(jax.grad(sparse)(params, variables, None, x), state, params)
      return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    variables = jax.eval_shape(functools.partial(s24.sparse_variables, recipe=recipe), params, state)
    checked = s24.check_step(step, params, state, variables, X)
    self.assertEqual(
      checked.brought, {'down': 'argument 2 (variables) at down', 'up': 'argument 2 (variables) at up'}
    )
    message = r'down, up: the mask comes with argument 2 \(variables\) at down, not from.*call sparse_variables'
    self.assertRegex(str(checked), message)
    for call, argument in (
      (lambda: s24.check_step(jax.jit(step), params, state, variables, X), r'2 \(variables\) at down,'),
      (lambda: s24.check_step(lambda *args: step(*args)[0], params, state, variables, X), '2 at down,'),
      (lambda: s24.check_step(step, params, state, variables=variables, x=X), 'variables at down,'),
    ):
      self.assertRegex(str(call()), f'comes with argument {argument}')

  def test_masks_that_are_not_those_of_the_optimizer(self):
    recipe, params = RECIPES['ste'], params_of()
    tx, sparse = s24.sparse_training(optax.sgd(0.1), recipe), s24.sparsify(loss, RECIPES['ste'])
    state = jax.eval_shape(tx.init, params)
    before = s24.sparse_variables(params, None, recipe)
    for made in (lambda params: s24.sparse_variables(params, None, recipe), lambda params: before):

      def step(params, state, x, made=made):
        return tx.update(jax.grad(sparse)(params, made(params), None, x), state, params)

      with self.assertRaisesRegex(ValueError, 'its mask is not computed from the optimizer state of this step'):
        s24.check_step(step, params, state, X)

  def test_a_train_state_with_an_average_and_gradients_that_are_added_up(self):
    recipe, model = s24.recipes.ste('kernel'), nn.Dense(4)
    sparse = s24.sparsify(model, recipe)
    params = parameters(model, X)
    tx = optax.MultiSteps(s24.sparse_training(optax.adam(0.1), recipe), 2)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, average, x, model):
      def loss(params):
        given = {'params': params}
        if model is sparse:
          given['sparse24'] = s24.sparse_variables(params, state.opt_state, recipe)
        teacher = state.apply_fn({'params': average}, x)
        return ((model.apply(given, x) - teacher) ** 2).mean()

      state = state.apply_gradients(grads=jax.grad(loss)(state.params))
      return state, optax.incremental_update(state.params, average, 0.1)

    self.assertEqual(list(s24.check_step(step, state, params, X, model=sparse).weights), ['kernel'])
    with self.assertRaisesRegex(ValueError, 'kernel: the step reads it dense at'):
      s24.check_step(step, state, params, X, model=model)

  @parameterized.parameters('bd', 'abd')
  def test_two_optimizers(self, of_critic):
    """Of an actor and a critic, some of whose weights or all have the same names."""
    recipe = s24.recipes.ste('.')
    actor, critic = ({name: np.eye(16, dtype=np.float32) for name in names} for names in ('bd', of_critic))
    tx = s24.sparse_training(optax.adam(0.1), recipe)

    def layers(params, x):
      return functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), x)

    def run(params, state, x, dense=False):
      variables = s24.sparse_variables(params, state, recipe)
      return layers(params, x) if dense else s24.sparsify(layers, recipe)(params, variables, None, x)

    def critic_loss(critic, actor, states, x, dense):
      states = states[::-1] if dense == 'crossed' else states
      return (run(critic, states[1], run(actor, states[0], x), 'critic' in dense) ** 2).mean()

    def actor_loss(actor, critic, states, x, dense):
      hidden = run(actor, states[0], x, 'actor' in dense)
      return run(critic, states[1], hidden, 'critic' in dense or 'where it is not trained' in dense).mean()

    def step(actor, critic, states, x, *, dense=(), times=1):
      for _ in range(times):
        mine, other = states
        updates, other = tx.update(jax.grad(critic_loss)(critic, actor, states, x, dense), other, critic)
        critic, states = optax.apply_updates(critic, updates), (mine, other)
        updates, mine = tx.update(jax.grad(actor_loss)(actor, critic, states, x, dense), mine, actor)
        actor, states = optax.apply_updates(actor, updates), (mine, other)
      return actor, critic, states

    def half(actor, state, x):
      return step(actor, critic, (state, tx.init(critic)), x)[0]

    given = actor, critic, (tx.init(actor), tx.init(critic)), X
    names = [*(f'argument 0 (actor) at {p}' for p in actor), *(f'argument 1 (critic) at {p}' for p in critic)]
    for how in ({}, {'times': 2}, {'dense': 'where it is not trained'}):
      weights = s24.check_step(functools.partial(step, **how), *given).weights
      self.assertCountEqual(weights, names)
      self.assertTrue(all(weights.values()))
    for dense, other in (('actor', 'critic'), ('critic', 'actor')):
      with self.assertRaisesRegex(ValueError, rf'^argument \d \({dense}\) at b, .*: the step reads it dense') as error:
        s24.check_step(functools.partial(step, dense=dense), *given)
      self.assertNotIn(f'({other})', str(error.exception))
    if of_critic == 'bd':
      with self.assertRaisesRegex(ValueError, r'(?s)\(critic\) at b.* reads it dense.*with that of another optimizer'):
        s24.check_step(functools.partial(step, dense='crossed'), *given)
    self.assertEqual(list(s24.check_step(half, actor, tx.init(actor), X).weights), list(actor))
    with self.assertRaisesRegex(ValueError, '2 states of sparse_training.*of several optimizers give the state of one'):
      s24.sparse_variables(actor, given[2], recipe)

  @parameterized.parameters('average', 'the same weights')
  def test_what_is_evaluated_beside_a_dense_loss_does_not_count(self, of):
    def metric(sparse):
      return lambda params, average: sparse(average if of == 'average' else params)

    with self.assertRaisesRegex(ValueError, '^w: the step reads it dense at [^ ]* [(]square[)], while'):
      check_of(lambda sparse: (lambda params, _: square(params, X), metric(sparse)))
    # Nor where no matmul shows it, as an elementwise product, nor where a low rank is added.
    for dense, found in (
      (lambda w: X[..., None] * w[None], 'no matmul of the step reads it under its mask on the way to'),
      (lambda w: X @ (w + X.T @ X), 'the step reads it dense at'),
    ):
      with self.assertRaisesRegex(ValueError, f'^w: {found}'):
        check_of(lambda sparse, dense=dense: (lambda params, _: (dense(params['w']) ** 2).sum(), metric(sparse)))

  def test_a_dense_metric_beside_a_sparse_loss_does_not_count(self):
    def made(sparse):
      return lambda params, average: sparse(params) - square(average, X), lambda params, _: square(params, X)

    (line,) = check_of(made).weights['w']
    self.assertRegex(line, r'[(]square[)]')

  def test_a_linear_loss_whose_gradient_does_not_depend_on_the_weight(self):
    def linear(params, x):
      return (x @ params['w']).sum()

    check_of(lambda sparse: (lambda params, _: sparse(params, linear), lambda *_: 0))
    with self.assertRaisesRegex(ValueError, '^w: the step reads it dense at'):
      check_of(lambda sparse: (lambda params, _: linear(params, X), lambda *_: 0))

  def test_muon_and_barriers(self):
    def made(sparse):
      def loss(params, _):
        x, params = jax.lax.optimization_barrier((X, params))
        return sparse(params) * (x @ x.T).sum()  # which is of x alone

      return loss, lambda *_: 0

    check_of(made)
    check_of(made, optimizer=optax.contrib.muon(0.1))

  def test_wrappers_with_an_inner_state_of_their_own(self):
    def made(sparse):
      return lambda params, _: sparse(params), lambda *_: 0

    check_of(made, optimizer=optax.adam(0.1), around=lambda tx: optax.apply_if_finite(tx, 3))

  @parameterized.named_parameters(
    ('rate', lambda: optax.scale(-1e-2)),
    ('schedule', lambda: optax.scale_by_learning_rate(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))),
    ('average', lambda: optax.ema(0.9)),
    ('sign', lambda: optax.stateless(lambda updates, _: jax.tree.map(jnp.negative, updates))),
  )
  def test_updates_that_are_multiplied_behind_the_wrapper(self, behind):
    for around in (lambda tx: tx, lambda tx: optax.MultiSteps(tx, 2), lambda tx: optax.apply_if_finite(tx, 3)):
      with self.assertRaisesRegex(ValueError, '^w: the update of sparse_training is multiplied by something .* inside'):
        check_of(sparse_alone, optimizer=optax.adam(0.1), around=lambda tx, f=around: f(optax.chain(tx, behind())))

  @parameterized.named_parameters(
    ('one', lambda u, ok: u * 1.0),
    ('finite', lambda u, ok: u * ok),
    ('chosen', lambda u, ok: u * jnp.where(ok, 1.0, 0.0)),
    ('branches', lambda u, ok: jax.lax.cond(ok, lambda u: u, jnp.zeros_like, u)),
    ('cast', lambda u, ok: u.astype(jnp.bfloat16)),
    ('placed', lambda u, ok: jax.lax.with_sharding_constraint(u, jax.sharding.SingleDeviceSharding(jax.devices()[0]))),
    ('mean_over_devices', lambda u, ok: jax.vmap(lambda u: jax.lax.pmean(u, 'i'), axis_name='i')(u[None])[0]),
    ('norm', lambda u, ok: jnp.where(jnp.linalg.norm(3 * u) > 0, u, u)),
  )
  def test_updates_that_are_let_through_or_placed(self, behind):
    def changes(updates, params):
      return jax.tree.map(lambda u: behind(u, jnp.isfinite(params['w']).all()), updates)

    check_of(sparse_alone, around=lambda tx: optax.chain(tx, optax.stateless(changes)))

  def test_updates_that_are_divided_otherwise_and_then_multiplied(self):
    mesh = jax.make_mesh((1,), ('i',), axis_types=(jax.sharding.AxisType.Explicit,))

    def changes(half):
      return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: half * jax.sharding.reshard(u, jax.P()), updates)
      )

    with jax.sharding.set_mesh(mesh):
      check_of(sparse_alone, around=lambda tx: optax.chain(tx, changes(1)))
      with self.assertRaisesRegex(ValueError, '^w: the update of sparse_training is multiplied by something'):
        check_of(sparse_alone, around=lambda tx: optax.chain(tx, changes(0.5)))

  def test_wrappers_that_hold_updates_back(self):
    for around in (
      lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
      lambda tx: optax.MultiSteps(optax.apply_if_finite(tx, 3), 2),
      lambda tx: optax.chain(tx, optax.masked(optax.scale(0.5), {'w': False})),
    ):
      check_of(sparse_alone, optimizer=optax.adam(0.1), around=around)

  def test_weights_that_are_updated_while_a_copy_is_trained(self):
    def dense(params):
      return square(params, X)

    check_of(lambda sparse: (lambda _, copy: sparse(copy), lambda *_: 0), wrt=1)
    with self.assertRaisesRegex(ValueError, '^w: the step reads it dense at'):
      check_of(lambda sparse: (lambda _, copy: dense(copy), lambda *_: 0), wrt=1)

  def test_a_penalty_that_multiplies_the_weight_is_named(self):
    def made(sparse):
      def penalty(params):
        return jnp.linalg.norm(params['w'] @ np.ones(16, np.float32))

      return lambda params, _: sparse(params) + penalty(params), lambda *_: 0

    with self.assertRaisesRegex(
      ValueError, r'^w: the step reads it dense at \S* \(.*penalty\), and sparse at \S* \(square\), .*a penalty'
    ):
      check_of(made)

  def test_a_step_that_does_not_show_what_it_trains(self):
    def made(sparse):
      return lambda params, _: sparse(params), lambda *_: 0

    with self.assertRaisesRegex(ValueError, 'the step makes no update of sparse_training'):
      check_of(made, update=False)
    with self.assertRaisesRegex(ValueError, '^w: the update of sparse_training is given a weight that is no argument'):
      check_of(made, before=lambda params: {'w': params['w'] + X.sum()})

  def test_what_cannot_be_checked(self):
    step, tx = step_of(RECIPES['ste'], 'plain')
    with self.assertRaisesRegex(ValueError, r'hold 0 states of sparse_training.*sparse_training\(optax.adamw'):
      s24.check_step(step, params_of(), optax.sgd(0.1).init(params_of()), X)
    with self.assertRaisesRegex(ValueError, 'state of sparse_training for down, up, and no parameters'):
      s24.check_step(lambda state, x: x, jax.eval_shape(tx.init, params_of()), X)


if __name__ == '__main__':
  absltest.main()
