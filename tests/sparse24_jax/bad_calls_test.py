"""Every call that a user can get wrong, and what the message must name."""

from absl.testing import absltest, parameterized
import jax
import jax.export
import jax.numpy as jnp

import sparse24_jax as s24
from sparse24_jax import dot, dot_general, mvue24
from sparse24_jax.rules import match_rules

KEY = jax.random.key(0)
W, X = jnp.ones((8, 4)), jnp.ones((4, 8))
MASK = jnp.ones((8, 4), bool)
DENSE, STE = s24.DotPolicy(), s24.DotPolicy(s24.magnitude())
FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
SOFT = s24.DotPolicy(s24.soft_threshold_projection())
MVUE = s24.DotPolicy(weight_grad='mvue')
STATE, BLOCK_STATE = STE.projection.init(W), FST.projection.init(W)
RULE, NUMBERS = s24.Rule('a', STE), (((1,), (0,)), ((), ()))
SYMBOLIC = jax.ShapeDtypeStruct((*jax.export.symbolic_shape('b'), 8), jnp.float32)
BATCHED = (((2,), (1,)), ((0,), (0,)))
EXPERTS, EXPERT_STATE = jnp.ones((2, 8, 4)), STE.projection.init(jnp.ones((2, 8, 4)))
DENSE_RUN = s24.recipes.dense()


def gradient(x, w, state, **kwargs):
  return jax.grad(lambda w: dot(x, w, state, **kwargs).sum())(w)


def tune(rate=1.0, candidates=(1e-5,), **kwargs):
  return s24.tune_masked_decay(lambda decay: rate, candidates, **kwargs)


ARRAYS = (
  ('mask_indivisible', lambda: s24.magnitude_mask(jnp.ones((6, 4))), r'w .*\(6, 4\).* length 6 along axis -2.* 4'),
  ('mask_indivisible_by_m', lambda: s24.magnitude_mask(jnp.ones((12, 4)), m=8), 'length 12 .*groups of 8'),
  ('mask_empty', lambda: s24.magnitude_mask(jnp.ones((0, 4))), 'length 0 along axis -2.*positive'),
  ('mask_n_too_large', lambda: s24.magnitude_mask(W, n=5), 'n=5 of m=4: n must be from 1 to m'),
  ('mask_n_zero', lambda: s24.magnitude_mask(W, n=0), 'n=0 of m=4'),
  ('mask_m_zero', lambda: s24.magnitude_mask(W, m=0), 'n=2 of m=0'),
  ('mask_axis', lambda: s24.magnitude_mask(W, axis=2), r'axis=2 is out of range .*\(8, 4\)'),
  ('mask_vector', lambda: s24.magnitude_mask(jnp.ones(8)), r'axis=-2 is out of range .*\(8,\)'),
  ('mask_integers', lambda: s24.magnitude_mask(W.astype(int)), 'w must be float32, .*found int32'),
  ('mask_bool', lambda: s24.magnitude_mask(MASK), 'w must be float32, .*found bool'),
  ('mask_list', lambda: s24.magnitude_mask([[1.0]] * 4), 'requires ndarray .*list'),
  ('transposable_columns', lambda: s24.transposable_mask(jnp.ones((8, 6))), r'length 6 along axis -1.* 4'),
  ('transposable_rows', lambda: s24.transposable_mask(jnp.ones((6, 8))), 'length 6 along axis -2'),
  ('transposable_vector', lambda: s24.transposable_mask(jnp.ones(8)), r'w of shape \(8,\) is not a matrix'),
  ('transposable_method', lambda: s24.transposable_mask(W, method='greedy'), "method='greedy': .*exact.*two_approx"),
  ('transposable_integers', lambda: s24.transposable_mask(W.astype(int)), 'float32, .*found int32'),
  ('greedy_columns', lambda: s24.transposable_mask(jnp.ones((8, 6)), method='two_approx'), 'length 6 along axis -1'),
  ('soft_indivisible', lambda: s24.soft_threshold(jnp.ones((6, 4))), 'length 6 along axis -2'),
  ('soft_integers', lambda: s24.soft_threshold(W.astype(int)), 'w must be float32, .*found int32'),
  ('scale_indivisible', lambda: s24.soft_threshold_scale(W, axis=3), 'axis=3 is out of range'),
  ('scale_integers', lambda: s24.soft_threshold_scale(W.astype(int)), 'w must be float32, .*found int32'),
  ('mvue_indivisible', lambda: mvue24(jnp.ones((4, 6)), KEY), r'x of shape \(4, 6\) has length 6 along axis -1'),
  ('mvue_scalar', lambda: mvue24(jnp.ones(()), KEY), r'axis=-1 is out of range .*\(\)'),
  ('mvue_integers', lambda: mvue24(X.astype(int), KEY), 'x must be float32, .*found int32'),
  ('mvue_no_key', lambda: mvue24(X, None), 'PRNG key'),
  ('mvue_seed_for_a_key', lambda: mvue24(X, 3), 'PRNG key'),
  ('mvue_keys', lambda: mvue24(X, jax.random.split(KEY)), 'single key'),
  ('mvue_origin_column', lambda: mvue24(X, KEY, origin=(0, 0, 2)), 'origin column 2 is not a multiple of four'),
  ('mvue_origin_length', lambda: mvue24(X, KEY, origin=(0, 0)), r'origin=\(0, 0\) must be \(batch, group, column\)'),
  ('flip_rate_nothing', lambda: s24.flip_rate({}, {}), 'at least one mask'),
  ('flip_rate_trees', lambda: s24.flip_rate({'a': MASK}, {'b': MASK}), r"expected keys: \['a'\].*\['b'\]"),
  ('flip_rate_shapes', lambda: s24.flip_rate(MASK, MASK[:4]), r'shapes \(8, 4\) and \(4, 4\)'),
  ('flip_rate_weights', lambda: s24.flip_rate(W, W), 'masks must be bool, found float32'),
  ('compress_float_mask', lambda: s24.compress(W, W), r'mask must be bool of shape \(8, 4\), found float32'),
  ('compress_shape', lambda: s24.compress(W, MASK.T), r'mask must be bool of shape \(8, 4\), found .*\(4, 8\)'),
  ('compress_indivisible', lambda: s24.compress(W[:6], MASK[:6]), 'length 6 along axis -2'),
  ('compress_axis', lambda: s24.compress(W, MASK, axis=-3), 'axis=-3 is out of range'),
  ('verify_dense', lambda: s24.verify24(W), r'not 2:4 along axis -2: group \(0, 0\) holds \[1\.0, 1\.0, 1\.0, 1\.0\]'),
  ('verify_indivisible', lambda: s24.verify24(W[:6]), 'length 6 along axis -2'),
)  # fmt: skip

OPS = (
  ('policy_input_grad', lambda: s24.DotPolicy(input_grad='mvue'), "input_grad='mvue': .*sparse.*dense"),
  ('policy_weight_grad', lambda: s24.DotPolicy(weight_grad='sparse'), "weight_grad='sparse': .*mvue"),
  ('policy_precision', lambda: s24.DotPolicy(precision='bf16'), "precision='bf16': .*fp8"),
  ('policy_implementation', lambda: s24.DotPolicy(implementation='cuda'), "implementation='cuda': known are"),
  ('policy_no_projection', lambda: s24.DotPolicy(input_grad='sparse'), 'needs a transposable projection, found None'),
  ('policy_projection', lambda: s24.DotPolicy(s24.magnitude(), input_grad='sparse'), "transposable .*'magnitude 2:4'"),
  ('policy_maker', lambda: s24.DotPolicy(s24.transposable), 'not a Projection; call its maker'),
  ('policy_name', lambda: s24.DotPolicy('magnitude'), "projection='magnitude' is not a Projection"),
  ('projection_n', lambda: s24.magnitude(n=5), 'n=5 of m=4'),
  ('projection_method', lambda: s24.transposable(method='best'), "method='best': .*exact.*two_approx"),
  ('dot_no_state', lambda: dot(X, W, policy=STE), r"'magnitude 2:4' must be bool .*\(8, 4\), found NoneType"),
  ('dot_state_shape', lambda: dot(X, W, MASK.T, policy=STE), r'must be bool of shape \(8, 4\), found bool .*\(4, 8\)'),
  ('dot_state_dtype', lambda: dot(X, W, W, policy=STE), 'must be bool .*found float32.*sparse_variables'),
  ('dot_other_state', lambda: dot(X, W, STATE, policy=SOFT), r"'soft_threshold' must be float32 of shape \(\)"),
  ('dot_state_tuple', lambda: dot(X, W, (STATE,), policy=STE), 'must be bool .*found tuple'),
  ('dot_shapes', lambda: dot(W, W, policy=DENSE), r'x of shape \(8, 4\) does not fit w .*axis -1 of x must be 8'),
  ('dot_symbolic', lambda: jax.eval_shape(lambda x: dot(x, W, STATE, policy=STE), SYMBOLIC),
   r'x of shape \(b, 8\) has symbolic dimensions, .* the weights that project'),
  ('dot_scalar', lambda: dot(jnp.ones(()), W, policy=DENSE), r'x of shape \(\) does not fit'),
  ('dot_stacked', lambda: dot(X, EXPERTS, policy=DENSE), r'w must be \[in, out\], found .*\(2, 8, 4\); use jax.vmap'),
  ('dot_dtypes', lambda: dot(X.astype(jnp.bfloat16), W, policy=DENSE), 'x is bfloat16 and w is float32; cast one'),
  ('dot_integers', lambda: dot(X.astype(int), W.astype(int), policy=DENSE), 'x and w must be float32, .*found int32'),
  ('dot_in', lambda: dot(X[:, :6], W[:6], STATE[:6], policy=STE), "length 6 along axis -2; .*'magnitude 2:4' .* 4"),
  ('dot_out', lambda: dot(X, W[:, :3], STATE[:, :3], policy=FST), "length 3 along axis -1; .*'transposable exact'"),
  ('dot_no_key', lambda: gradient(X, W, BLOCK_STATE, policy=FST),
   r"'mvue' needs a random key: f\(params, variables, key, \.\.\.\) .*rngs=\{'mvue': key\}.*dot\(\.\.\., key"),
  ('dot_tokens', lambda: gradient(X[:3], W, None, policy=MVUE, key=KEY), r'fours: x of shape \(3, 8\) has 3 tokens'),
  ('dot_no_tokens_axis', lambda: gradient(X[0], W, None, policy=MVUE, key=KEY), r'x of shape \(8,\) has 1 tokens'),
  ('general_two_axes', lambda: dot_general(W, W, (((0, 1), (0, 1)), ((), ())), policy=DENSE), 'over axis -2'),
  ('general_output_axis', lambda: dot_general(X, W, (((0,), (1,)), ((), ())), policy=DENSE), 'over axis -2'),
  ('general_no_axis', lambda: dot_general(X, W, (((), ()), ((), ())), policy=DENSE), r'dimension_numbers \(\(\(\), '),
  ('general_far_axis', lambda: dot_general(X, W, (((5,), (0,)), ((), ())), policy=DENSE), r'\(\(5,\), .*\(4, 8\)'),
  ('general_vector', lambda: dot_general(X, W[:, 0], NUMBERS, policy=DENSE), r'\[batch..., in, out\].*\(8,\)'),
  ('general_scalar', lambda: dot_general(X, jnp.ones(()), NUMBERS, policy=DENSE), r'\[batch..., in, out\]'),
  ('general_no_batch', lambda: dot_general(X, EXPERTS, (((1,), (1,)), ((), ())), policy=DENSE), 'leading batch axes'),
  ('general_batch_last', lambda: dot_general(jnp.ones((8, 4, 2)), jnp.ones((8, 4, 2)),
    (((0,), (0,)), ((2,), (2,))), policy=DENSE), 'leading batch axes'),
  ('general_batch_sizes', lambda: dot_general(jnp.ones((3, 4, 8)), EXPERTS, BATCHED, EXPERT_STATE, policy=STE),
    r'same leading batch axes.*\(3, 4, 8\) and \(2, 8, 4\)'),
  ('general_batch_state', lambda: dot_general(jnp.ones((2, 4, 8)), EXPERTS, BATCHED, STATE, policy=STE),
    r'must be bool of shape \(2, 8, 4\), found bool of shape \(8, 4\)'),
  ('general_no_state', lambda: dot_general(X, W, NUMBERS, policy=STE), 'state of projection'),
  ('general_no_key', lambda: jax.grad(lambda w: dot_general(X, w, NUMBERS, policy=MVUE).sum())(W), 'random key'),
  ('glu_activation', lambda: s24.gated_linear_unit(X, W, W, policy=DENSE, activation='tanh'), "'tanh': .*gelu.*silu"),
  ('glu_shapes', lambda: s24.gated_linear_unit(X, W, W[:, :2], policy=DENSE), r'w_gate .*\(8, 4\) and \(8, 2\)'),
  ('glu_no_state', lambda: s24.gated_linear_unit(X, W, W, policy=STE), "state of projection 'magnitude 2:4'"),
  ('glu_one_state', lambda: s24.gated_linear_unit(X, W, W, STATE, policy=STE), 'state must be a pair'),
  ('glu_short_state', lambda: s24.gated_linear_unit(X, W, W, (STATE,), policy=STE), 'state must be a pair'),
  ('glu_no_key', lambda: jax.grad(lambda w: s24.gated_linear_unit(X, w, w, policy=MVUE).sum())(W), 'random key'),
)  # fmt: skip

RECIPES = (
  ('rule_regex', lambda: s24.Rule('mlp/(', STE), r"rule path 'mlp/\(' is not a regular expression"),
  ('rule_path', lambda: s24.Rule(None, STE), 'rule path None must be a string'),
  ('rule_projection', lambda: s24.Rule('a', s24.magnitude()), "policy of rule 'a' must be a DotPolicy"),
  ('phase_name', lambda: s24.Phase('warmup', 0.5), "phase='warmup': known are .*dense.*sparse"),
  ('phase_zero', lambda: s24.Phase('dense', 0), r'has fraction 0; it must be in \(0, 1\]'),
  ('phase_above_one', lambda: s24.Phase('sparse', 1.5), 'has fraction 1.5'),
  ('phase_nan', lambda: s24.Phase('sparse', float('nan')), 'has fraction nan'),
  ('recipe_one_rule', lambda: s24.Recipe('r', RULE), 'rules must be a tuple of Rule'),
  ('recipe_list', lambda: s24.Recipe('r', [RULE]), 'rules must be a tuple of Rule'),
  ('recipe_paths', lambda: s24.Recipe('r', ('a',)), 'rules must be a tuple of Rule'),
  ('recipe_phase_names', lambda: s24.Recipe('r', phases=('sparse',)), 'phases must be a tuple of Phase'),
  ('recipe_one_phase', lambda: s24.Recipe('r', phases=s24.Phase('sparse', 1.0)), 'phases must be a tuple of Phase'),
  ('recipe_no_phase', lambda: s24.Recipe('r', phases=()), 'add up to 0, not 1'),
  ('recipe_fractions', lambda: s24.Recipe('r', phases=(s24.Phase('sparse', 0.7),)), 'add up to 0.7, not 1'),
  ('recipe_negative_decay', lambda: s24.Recipe('r', masked_decay=-1e-5), 'masked_decay=-1e-05 .*zero or more'),
  ('recipe_nan_decay', lambda: s24.Recipe('r', masked_decay=float('nan')), 'masked_decay=nan'),
  ('recipe_infinite_decay', lambda: s24.Recipe('r', masked_decay=float('inf')), 'masked_decay=inf'),
  ('recipe_no_decay', lambda: s24.Recipe('r', masked_decay=None), 'masked_decay=None must be a finite number'),
  ('recipe_text_decay', lambda: s24.Recipe('r', masked_decay='6e-5'), 'masked_decay=6e-5 must be a finite number'),
  ('recipe_decay_on', lambda: s24.Recipe('r', decay_on='moments'), "decay_on='moments': .*gradients.*weights"),
  ('recipe_refresh_zero', lambda: s24.Recipe('r', refresh_every=0), 'refresh_every=0 must be a whole number'),
  ('recipe_refresh_float', lambda: s24.Recipe('r', refresh_every=40.0), 'refresh_every=40.0 must be a whole number'),
  ('recipe_flip_rate', lambda: s24.Recipe('r', flip_rate='never'), "flip_rate='never': .*refresh.*step"),
  ('dense_path_alone', lambda: s24.recipes.dense('a'), "path='a' and watch=None: give both or neither"),
  ('dense_watch_alone', lambda: s24.recipes.dense(watch=s24.magnitude()), 'path=None and watch=.magnitude 2:4'),
  ('sr_ste_decay', lambda: s24.recipes.sr_ste('a', masked_decay=-1), 'masked_decay=-1'),
  ('sr_ste_decay_on', lambda: s24.recipes.sr_ste('a', masked_decay=0, decay_on='both'), "decay_on='both'"),
  ('fst_decay', lambda: s24.recipes.transposable_srste('a', masked_decay=-6e-5), 'masked_decay=-6e-05'),
  ('fst_refresh', lambda: s24.recipes.transposable_srste('a', masked_decay=0.0, refresh_every=-1), 'refresh_every=-1'),
  ('fst_all_dense', lambda: s24.recipes.transposable_srste('a', masked_decay=0.0, dense_fraction=1), r'in \[0, 1\)'),
  ('step_never', lambda: s24.recipes.step('a', dense_fraction=0), r'dense_fraction=0 must be in \(0, 1\)'),
  ('step_all_dense', lambda: s24.recipes.step('a', dense_fraction=1.0), 'dense_fraction=1.0 must be in'),
  ('s_ste_regex', lambda: s24.recipes.s_ste('['), 'not a regular expression'),
  ('ste_regex', lambda: s24.recipes.ste('*'), r"rule path '\*' is not a regular expression"),
  ('phase_at_end', lambda: s24.phase_at(DENSE_RUN, 10, 10), r'step 10 is not in \[0, 10\)'),
  ('phase_at_negative', lambda: s24.phase_at(DENSE_RUN, -1, 10), 'step -1 is not in'),
  ('phase_at_no_steps', lambda: s24.phase_at(DENSE_RUN, 0, 0), r'\[0, 0\)'),
  ('tune_no_candidates', lambda: tune(candidates=()), 'candidates is empty'),
  ('tune_negative', lambda: tune(candidates=(1e-5, -1e-5)), 'candidates=.*-1e-05.* zero or more'),
  ('tune_nan', lambda: tune(candidates=(float('nan'),)), 'candidates=.*nan'),
  ('tune_band_order', lambda: tune(band=(0.9, 0.6)), r'band=\(0.9, 0.6\) must be two rising'),
  ('tune_band_length', lambda: tune(band=(0.6,)), r'band=\(0.6,\) must be two rising'),
  ('tune_frozen_twin', lambda: tune(rate=0.0), 'dense twin flipped no mask'),
  ('tune_nan_rate', lambda: tune(rate=float('nan')), 'flip rate nan for the dense twin: no masks were compared'),
  ('match_nothing', lambda: match_rules({'a': W}, s24.recipes.ste('mlp/.*')), r"rule 'mlp/\.\*' .*weights are .*a"),
  ('match_part', lambda: match_rules({'mlp': {'up': W}}, s24.recipes.ste('mlp')), "rule 'mlp' .*mlp/up"),
  ('match_indivisible', lambda: match_rules({'a': W[:6]}, s24.recipes.ste('a')), 'a of .* length 6 along axis -2'),
)  # fmt: skip


class BadCallsTest(parameterized.TestCase):
  @parameterized.named_parameters(*ARRAYS, *OPS, *RECIPES)
  def test_message_names_what_to_fix(self, call, message):
    with self.assertRaises((ValueError, TypeError)) as caught:
      call()
    self.assertRegex(str(caught.exception), message)
    if isinstance(caught.exception, TypeError):  # only where JAX itself refuses what is no array or no key
      self.assertRegex(str(caught.exception), 'PRNG key|ndarray')

  @parameterized.named_parameters(
    ('dot', lambda x: dot(x, W[:6], policy=DENSE), 'does not fit'),
    ('mask', lambda x: s24.magnitude_mask(x[:, :3], axis=1), 'length 3'),
    ('mvue', lambda x: mvue24(x[:, :3], KEY), 'length 3'),
  )
  def test_at_trace_time_too(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(call, X)


if __name__ == '__main__':
  absltest.main()
