"""Every bad call of the set-up functions a user could make, and the part of the message that names what to fix."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.draws import parameters

KEY = jax.random.key(0)
X, UP = (jnp.asarray(np.random.default_rng(0).standard_normal((8, n), np.float32)) for n in (8, 12))
PARAMS = {'mlp': {'up': {'kernel': UP, 'bias': jnp.ones(12)}}, 'head': {'kernel': X}}
STE = s24.recipes.ste('mlp/.*')


def block(params, x):
  up, down = (params['mlp'][role]['kernel'] for role in ('up', 'down'))
  return jax.nn.gelu(x @ up) @ down


SYMBOLIC = jax.ShapeDtypeStruct((*jax.export.symbolic_shape('b'), 8), jnp.float32)
FST = s24.recipes.transposable_srste('mlp/.*', masked_decay=0.1)
SGD = optax.sgd(0.1)
STATE = jax.jit(s24.sparse_training(SGD, STE).init)(PARAMS)
BOTH = {'mlp': {'up': {'kernel': UP}, 'down': {'kernel': UP.T}}}
MORE_DENSE, ANYWHERE = STE.with_dense('.*/down/.*'), s24.recipes.ste('.*mlp/.*')
OF_BOTH, LESS = (jax.jit(s24.sparse_training(SGD, recipe).init)(BOTH) for recipe in (STE, MORE_DENSE))
OF_PARAMS, OF_ALL = (
  jax.jit(s24.sparse_training(SGD, ANYWHERE).init)(tree) for tree in (PARAMS, {'params': PARAMS})
)


@jax.tree_util.register_pytree_with_keys_class
class Held(dict):
  """A module as those of Equinox are: a tree that can be called."""

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.DictKey(name), value) for name, value in self.items()], tuple(self)

  @classmethod
  def tree_unflatten(cls, names, values):
    return cls(zip(names, values, strict=True))

  def __call__(self, x):
    return x @ self['mlp']['up']['kernel']


class Around:
  """A model as the Flax ones of `transformers` are."""

  module, params = nn.Dense(8), PARAMS

  def __call__(self, x):
    return self.module.apply({'params': self.params}, x)


def shaped(*shape):
  return {'mlp': {'up': {'kernel': jnp.ones(shape)}}}


def init(recipe, params=PARAMS):
  return s24.sparse_training(SGD, recipe).init(params)


# As Equinox keeps them beside its arrays.
NO_ARRAYS = {**PARAMS, 'activation': jax.nn.relu, 'layers': {'name': 'up', 'rate': 0.1, 'bias': None}}


def evolved(inner):
  tx = s24.sparse_training(inner, s24.recipes.rigl('mlp/.*kernel', density=0.5, total_steps=10, refresh_every=5))
  return jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), PARAMS)


def linen_apply(model, recipe, collection):
  params = parameters(model, X)
  return s24.sparsify(model, recipe).apply({'params': params, **collection}, X)


SPARSE_TRAINING = (
  ('unknown_phase', lambda: s24.sparse_training(SGD, STE, phase='warm-up'),
   r"phase='warm-up': known are \['dense', 'sparse'\]"),
  ('decay_on_weights_without_rate', lambda: s24.sparse_training(SGD, s24.recipes.sr_ste('.*', masked_decay=0.1)),
   r"recipe 'sr_ste' decays weights.*sparse_training\(\.\.\., learning_rate=\.\.\.\)"),
  ('update_without_params', lambda: s24.sparse_training(SGD, STE).update(PARAMS, STATE),
   r'sparse_training needs the parameters: call update\(updates, state, params\)'),
  ('rule_without_match', lambda: init(s24.recipes.ste('ffn/.*')),
   r"rule 'ffn/\.\*' of recipe 'ste' decides for no weight; weights are head/kernel, mlp/up/kernel:"),
  ('rule_that_matches_a_part_of_the_path', lambda: init(s24.recipes.ste('up/kernel')), "rule 'up/kernel'.*no weight"),
  ('rule_that_matches_biases_only', lambda: init(s24.recipes.ste('.*bias')), "rule '.*bias'.*no weight"),
  ('rule_behind_another', lambda: init(s24.Recipe('two', STE.rules + FST.rules)), "rule 'mlp/.*'.*no weight"),
  ('no_weights_at_all', lambda: init(STE, {'b': jnp.ones(4)}), r'weights are \[\]'),
  ('groups_do_not_fit_in', lambda: init(STE, shaped(6, 8)),
   r'mlp/up/kernel of shape \(6, 8\) has length 6 along axis -2.*magnitude 2:4.*multiple of 4'),
  ('groups_do_not_fit_out', lambda: init(FST, shaped(8, 6)),
   r'mlp/up/kernel of shape \(8, 6\) has length 6 along axis -1.*transposable exact.*multiple of 4'),
  ('empty_weight', lambda: init(STE, shaped(0, 8)), r'mlp/up/kernel of shape \(0, 8\) has length 0 along axis -2'),
  ('no_outputs', lambda: init(STE, shaped(8, 0)), r'\(8, 0\) has length 0 along axis -1.*multiple of 1, one or more'),
  ('optimizer_that_was_not_called', lambda: s24.sparse_training(optax.adamw, STE),
   r'inner must be an optimizer such as optax\.adamw\(1e-3\), not its state .*; found function'),
  ('state_in_place_of_an_optimizer_to_check',
   lambda: s24.check(STE, lambda p, x: x @ p['mlp']['up']['kernel'], PARAMS, X, optimizer=STATE),
   r'optimizer must be an optimizer such as tx = sparse_training\(.*, not its state .*; found SparseTrainingState'),
  ('nnx_optimizer_around_which_nothing_goes',
   lambda: s24.sparse_training(nnx.Optimizer(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param), STE),
   'inner must be an optimizer such as .*found Optimizer, which holds one: give its tx'),
  ('init_with_settings', lambda: init(STE, {**PARAMS, 'dropout': {'rate': 0.1, 'inference': False}, 'heads': 8}),
   r'found others at dropout/inference \(bool\), heads \(int\)\. Equinox: .*eqx\.filter\(model, eqx\.is_inexact_array'),
  ('update_without_a_gradient',
   lambda: s24.sparse_training(SGD, STE).update({**PARAMS, 'table': None}, STATE, {**PARAMS, 'table': jnp.arange(3)}),
   r'gradients have nothing for table: .*eqx\.filter'),
  ('twice', lambda: s24.sparse_training(optax.chain(s24.sparse_training(SGD, STE)), STE).init(PARAMS),
   'inner holds sparse_training already'),
  ('moments_in_one_vector', lambda: evolved(optax.flatten(optax.adam(0.1))),
   'moments, but those of the inner optimizer are in no tree'),
  ('swapped_in_verify_weights', lambda: s24.verify_weights(STE, PARAMS), 'recipe must be a Recipe.*dict: arguments'),
  ('name_in_place_of_a_recipe', lambda: s24.sparse_training(SGD, 'ste'), "recipe must be a Recipe.*found 'ste'"),
  ('name_in_place_of_a_recipe_to_check', lambda: s24.check('ste', lambda p: p, PARAMS),
   r"recipe must be a Recipe.*found 'ste'\. It is check\(recipe, f"),
  ('unknown_distribution', lambda: s24.layer_densities(0.5, {'w': (8, 8)}, 'even'), "distribution='even': known are"),
  ('other_params_than_at_init', lambda: s24.sparse_training(SGD, STE).update(shaped(8, 8), STATE, shaped(8, 8)),
   'Dict key mismatch|key'),
  ('update_under_a_recipe_that_leaves_more_dense',
   lambda: s24.sparse_training(SGD, MORE_DENSE).update(BOTH, OF_BOTH, BOTH),
   r'this recipe leaves mlp/down/kernel dense\. Go on with the recipe of the run; or, .* carry_over\(tx\.init\(params'),
  ('update_under_a_recipe_that_leaves_fewer_dense', lambda: s24.sparse_training(SGD, STE).update(BOTH, LESS, BOTH),
   r"holds states for mlp/up/kernel: it was made with another recipe"),
  ('init_of_whole_variables', lambda: init(STE, {'params': PARAMS}),
   r"weights are params/head/kernel.*whole dictionary of variables: give .*variables\['params'\]$"),
  ('update_with_a_state_of_whole_variables', lambda: s24.sparse_training(SGD, ANYWHERE).update(PARAMS, OF_ALL, PARAMS),
   r"made of a whole dictionary of variables, and these are its parameters: tx\.init\(variables\['params'\]\)"),
)  # fmt: skip

RECIPES = (
  ('bad_regex', lambda: s24.recipes.ste('mlp/('), r"rule path 'mlp/\(' is not a regular expression"),
  ('negative_decay', lambda: s24.recipes.sr_ste('.*', masked_decay=-1.0), r'masked_decay=-1\.0.*zero or more'),
  ('nan_decay', lambda: s24.recipes.transposable_srste('.*', masked_decay=float('nan')), 'masked_decay=nan.*finite'),
  ('unknown_decay_on', lambda: s24.recipes.sr_ste('.*', masked_decay=0.1, decay_on='moments'),
   r"decay_on='moments': known are \['gradients', 'weights'\]"),
  ('refresh_zero', lambda: s24.recipes.transposable_srste('.*', masked_decay=0.1, refresh_every=0),
   r'refresh_every=0.*1 or more'),
  ('refresh_true', lambda: s24.recipes.transposable_srste('.*', masked_decay=0.1, refresh_every=True),
   'refresh_every=True must be a whole number'),
  ('decay_true', lambda: s24.recipes.sr_ste('.*', masked_decay=True), 'masked_decay=True.*finite number'),
  ('refresh_fraction', lambda: s24.recipes.transposable_srste('.*', masked_decay=0.1, refresh_every=1.5),
   'refresh_every=1.5.*whole number'),
  ('all_dense', lambda: s24.recipes.transposable_srste('.*', masked_decay=0.1, dense_fraction=1.0),
   r'dense_fraction=1\.0 must be in \[0, 1\)'),
  ('step_without_dense', lambda: s24.recipes.step('.*', dense_fraction=0.0),
   r'dense_fraction=0\.0 must be in \(0, 1\)'),
  ('dense_path_without_watch', lambda: s24.recipes.dense('.*'), r"path='\.\*' and watch=None: give both or neither"),
  ('dense_watch_without_path', lambda: s24.recipes.dense(watch=s24.transposable()),
   "path=None and watch='transposable exact'"),
  ('unknown_phase', lambda: s24.Phase('warm', 0.5), r"phase='warm': known are"),
  ('empty_phase', lambda: s24.Phase('dense', 0.0), r"phase 'dense' has fraction 0\.0; it must be in \(0, 1\]"),
  ('phases_that_do_not_add_up', lambda: s24.Recipe('r', phases=(s24.Phase('dense', 0.5),)), 'add up to 0.5, not 1'),
  ('no_phases', lambda: s24.Recipe('r', phases=()), 'add up to 0, not 1'),
  ('unknown_flip_rate', lambda: s24.Recipe('r', flip_rate='epoch'),
   r"flip_rate='epoch': known are \['refresh', 'step'\]"),
  ('step_out_of_run', lambda: s24.phase_at(STE, 10, 10), r'step 10 is not in \[0, 10\)'),
  ('traced_step', lambda: jax.jit(lambda step: s24.phase_at(STE, step, 10))(3), 'step is traced: give a Python number'),
  ('pattern_in_place_of_a_policy', lambda: s24.recipes.neuron_level('up', 'down', policy='64:2:8'),
   "policy must be an ActivationPolicy, found '64:2:8'"),
  ('negative_step', lambda: s24.phase_at(STE, -1, 10), r'step -1 is not in \[0, 10\)'),
  ('sparse_input_grad_of_a_row_mask', lambda: s24.DotPolicy(s24.magnitude(), input_grad='sparse'),
   "input_grad='sparse' needs a transposable projection, found 'magnitude 2:4'"),
  ('sparse_input_grad_of_nothing', lambda: s24.DotPolicy(input_grad='sparse'), 'needs a transposable projection.*None'),
  ('unknown_weight_grad', lambda: s24.DotPolicy(weight_grad='random'), "weight_grad='random': known are"),
  ('unknown_precision', lambda: s24.DotPolicy(precision='int8'),
   r"precision='int8': known are \['default', 'fp8', 'fp8_e4m3'\]"),
  ('unknown_implementation', lambda: s24.DotPolicy(implementation='cuda'), "implementation='cuda': known are"),
  ('projection_not_called', lambda: s24.DotPolicy(s24.magnitude), r'projection=.*is not a Projection.*magnitude\(\)'),
  ('more_kept_than_grouped', lambda: init(s24.Recipe('r', (s24.Rule('mlp/.*', s24.DotPolicy(s24.magnitude(n=5))),))),
   'n=5 of m=4'),
  ('kept_in_fractions', lambda: s24.magnitude(n=1.5), 'n=1.5 must be a whole number, 1 or more'),
  ('unknown_search', lambda: s24.transposable(method='greedy'), "method='greedy': known are"),
)  # fmt: skip

OTHERS = (
  ('decay_below_zero', lambda: s24.add_masked_decay(-0.1, {}), r'decay=-0\.1.*zero or more'),
  ('decay_infinite', lambda: s24.add_masked_decay(float('inf'), {}), 'decay=inf.*finite'),
  ('decay_of_an_array', lambda: s24.add_masked_decay(jnp.ones(3), {}), 'decay=.*must be a finite number'),
  ('decay_without_params', lambda: s24.add_masked_decay(0.1, {}).update({}, optax.EmptyState()),
   r'add_masked_decay needs the parameters: call update\(updates, state, params\)'),
  ('masks_of_another_tree',
   lambda: s24.add_masked_decay(0.1, {'v': X}).update({'w': X}, s24.add_masked_decay(0.1, {}).init({}), {'w': X}),
   'key'),
  ('flip_rate_of_a_plain_optimizer', lambda: s24.get_flip_rate(optax.adam(0.1).init(PARAMS)),
   'holds 0 states of sparse_training, expected one: .* a saved one is restored into the tree'),
  ('phase_of_swapped_arguments', lambda: s24.phase_at(3, STE, 30), r'must be a Recipe.*phase_at\(recipe, step'),
  ('refresh_of_swapped_arguments', lambda: s24.refresh_at(3, STE), r'must be a Recipe.*refresh_at\(recipe, step'),
  ('attention_of_swapped_arguments', lambda: s24.attention_at(3, STE, 30),
   r'must be a Recipe.*attention_at\(recipe, step'),
  ('step_adam_of_no_parameter', lambda: s24.step_adam(0.1, phase='sparse', path='mlp').init(PARAMS),
   "path='mlp' matches no parameter"),
  ('flip_rate_of_two', lambda: s24.get_flip_rate((STATE, STATE)), 'holds 2 states of sparse_training, expected one'),
  ('settled_without_step_adam', lambda: s24.step_has_settled(STATE), 'holds 0 states of step_adam, expected one'),
  ('step_adam_of_unknown_phase', lambda: s24.step_adam(0.1, phase='frozen'), r"phase='frozen': known are"),
  ('project_of_unknown_phase', lambda: s24.project(PARAMS, STATE, STE, phase='eval'), r"phase='eval': known are"),
  ('project_with_a_foreign_recipe', lambda: s24.project(PARAMS, STATE, s24.recipes.ste('.*')),
   r"makes head/kernel, mlp/up/kernel sparse.*states for mlp/up/kernel: .*another recipe"),
  ('project_under_a_recipe_that_leaves_more_dense', lambda: s24.project(BOTH, OF_BOTH, MORE_DENSE),
   'this recipe leaves mlp/down/kernel dense. Go on with the recipe of the run'),
  ('variables_of_whole_variables', lambda: s24.sparse_variables({'params': PARAMS}, OF_PARAMS, ANYWHERE),
   r"params is a whole dictionary of variables: give variables\['params'\], as tx\.init was"),
  ('variables_with_a_state_of_whole_variables', lambda: s24.sparse_variables(PARAMS, OF_ALL, ANYWHERE),
   r"made of a whole dictionary of variables, and these are its parameters: tx\.init\(variables\['params'\]\)"),
  ('project_with_another_projection', lambda: s24.project(PARAMS, STATE, s24.recipes.s_ste('mlp/.*')),
   r"mlp/up/kernel: its state was made by projection 'magnitude 2:4', and the recipe has 'soft_threshold'"),
  ('variables_with_another_projection', lambda: s24.sparse_variables(PARAMS, STATE, s24.recipes.s_ste('mlp/.*')),
   r"mlp/up/kernel: its state was made by projection 'magnitude 2:4', and the recipe has 'soft_threshold'"),
  ('init_with_leaves_that_are_no_arrays', lambda: init(STE, NO_ARRAYS),
   r'found others at activation \(\w+\), layers/name \(str\)\. Equinox: .*eqx\.filter\(model, eqx\.is_inexact_array\)'),
  ('update_with_leaves_that_are_no_arrays',
   lambda: s24.sparse_training(SGD, STE).update(PARAMS, STATE, NO_ARRAYS), r'found others at activation \(\w+\), la'),
  ('variables_of_other_params', lambda: s24.sparse_variables(shaped(16, 12), STATE, STE),
   r'mlp/up/kernel.*bool of shape \(16, 12\).*\(8, 12\)'),
  ('project_without_state', lambda: s24.project(PARAMS, optax.adam(0.1).init(PARAMS), STE), 'holds 0 states'),
  ('variables_without_state', lambda: s24.sparse_variables(PARAMS, SGD.init(PARAMS), STE), 'holds 0 states'),
  ('variables_with_a_foreign_recipe', lambda: s24.sparse_variables(PARAMS, STATE, s24.recipes.ste('.*')),
   'was made with another recipe'),
  ('variables_of_the_state_first', lambda: s24.sparse_variables(STATE, PARAMS, STE),
   'params is an optimizer state: arguments in another order'),
  ('project_of_the_state_first', lambda: s24.project((STATE,), PARAMS, STE), 'params is an optimizer state: arguments'),
  ('bind_of_the_tokens_first', lambda: s24.bind(STE, lambda x, p: x, X, PARAMS),
   r"weights that recipe 'ste' matches are not in params, but in .* It is bind\(recipe, f, params, \*args\)"),
  ('bind_of_symbolic_dimensions',
   lambda: s24.bind(STE, block, BOTH, SYMBOLIC),
   r'an argument of shape \(b, 8\) has symbolic dimensions, .* the weights that project'),
  ('bind_of_a_function_that_fails', lambda: s24.bind(STE, lambda x, p: 1 // 0, X, PARAMS),
   r'lambda p, x: f\(x, p\)\. What it raised: ZeroDivisionError: '),
  ('init_of_one_array', lambda: init(STE, X),
   r"weights are \[''\].* params is one array, not a tree of them: arguments in another order"),
  ('variables_of_the_model_variables', lambda: s24.sparse_variables({'params': PARAMS}, STATE, STE),
   r"rule 'mlp/\.\*'.*weights are params/head/kernel"),
)  # fmt: skip

SPARSIFY = (
  ('number', lambda: s24.sparsify(3, STE), r'flax\.linen\.Module or a flax\.nnx\.Module, found int'),
  ('module_that_holds_its_weights', lambda: s24.sparsify(Held(PARAMS), STE),
   r"model is a Held that holds the weights mlp/up/kernel itself: .*Equinox: .* = eqx.partition\(model"),
  ('object_around_a_module', lambda: s24.sparsify(Around(), STE),
   r'model is a Around, which holds a module and its parameters: give its module, model\.module, and .*model\.params'),
  ('bind_of_an_object_around_a_module', lambda: s24.bind(STE, Around(), PARAMS, X), r'f is a Around, .*f\.module'),
  ('recipe_first', lambda: s24.sparsify(STE, nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
   r'^recipe must be a Recipe, as .* make, found Linear: arguments in another order\?$'),
  ('class_instead_of_model', lambda: s24.sparsify(nn.Dense, STE), 'found type'),
  ('unknown_phase', lambda: s24.sparsify(nn.Dense(8), STE, phase='train'), r"phase='train': known are"),
  ('nnx_rule_without_match', lambda: s24.sparsify(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), STE), 'decides for no weight'),
  ('nnx_no_matmul', lambda: s24.sparsify(nnx.Conv(8, 8, (1,), rngs=nnx.Rngs(0)), s24.recipes.ste('kernel'))(X),
   'kernel of shape .*: conv_general_dilated at'),
  ('nnx_stream_missing',
   lambda: s24.sparsify(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), s24.recipes.s_ste('kernel'), rngs=nnx.Rngs(0)),
   r"none named 'mvue': pass nnx\.Rngs\(mvue=seed\)"),
  ('linen_rule_without_match_at_init', lambda: jax.eval_shape(s24.sparsify(nn.Dense(8), STE).init, KEY, X),
   'decides for no weight'),
  ('linen_rule_without_match', lambda: linen_apply(nn.Dense(8), STE, {}), 'decides for no weight'),
  ('linen_collection_missing', lambda: linen_apply(nn.Dense(8), s24.recipes.ste('kernel'), {}),
   r"kernel: no state; give what sparse_variables\(params, opt_state, recipe, phase=phase\) .*collection 'sparse24'"),
  ('linen_state_of_another_recipe',
   lambda: linen_apply(nn.Dense(8), s24.recipes.ste('kernel'), {'sparse24': {'kernel': jnp.float32(1)}}),
   r"kernel: state of projection 'magnitude 2:4' must be bool of shape \(8, 8\), found float32"),
  ('linen_no_hook', lambda: linen_apply(nn.Conv(8, (4,)), s24.recipes.ste('kernel'), {'sparse24': {}}),
   r'kernel of shape \(4, 8, 8\): conv_general_dilated at'),
)  # fmt: skip


LATE = s24.recipes.step('mlp/.*')
WITHOUT_PHASE = (
  ('sparse_training', lambda: s24.sparse_training(SGD, LATE)),
  ('sparsify_linen', lambda: s24.sparsify(nn.Dense(8), LATE)),
  ('sparsify_nnx', lambda: s24.sparsify(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), LATE)),
  ('sparse_variables', lambda: s24.sparse_variables(PARAMS, STATE, LATE)),
  ('sparse_variables_nnx', lambda: s24.sparse_variables(nnx.State(PARAMS), STATE, LATE)),
  ('project', lambda: s24.project(PARAMS, STATE, LATE)),
)


class BadSetupTest(parameterized.TestCase):

  @parameterized.named_parameters(*SPARSE_TRAINING)
  def test_sparse_training(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  @parameterized.named_parameters(*RECIPES)
  def test_recipe(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  @parameterized.named_parameters(*OTHERS)
  def test_other(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  @parameterized.named_parameters(*WITHOUT_PHASE)
  def test_a_recipe_that_begins_dense_without_a_phase(self, call):
    """It would train dense to the end, without a word."""
    with self.assertRaisesRegex(
      ValueError, r"recipe 'step' begins dense: say phase='dense' or phase='sparse' \(see phase_at\)"
    ):
      call()

  @parameterized.named_parameters(*SPARSIFY)
  def test_sparsify(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()


if __name__ == '__main__':
  absltest.main()
