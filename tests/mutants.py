"""Mutants: the project with one line changed, each of which breaks a promise and must fail a fast test.

`make mutants` changes one at a time in a copy of the repository, runs the tests that have to notice, and says which
mutants survive. It takes three seconds of CPU a mutant, so it is no part of the test commands; that each line is still
there, and each test still fast, is (mutants_test.py). A new promise gets a line here.
"""

import argparse
import importlib
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
  """A changed line, and the fast tests that must fail by it.

  Attributes:
    promise: what it breaks.
    file: where; another file of its package, if the line moved.
    old: text that occurs there once, whatever the white space.
    new: text in its place.
    tests: their file.
    only: a part of their names, as pytest's -k takes it.
  """

  promise: str
  file: str
  old: str
  new: str
  tests: str
  only: str


def _of(folder: str, tests: str, *mutants: tuple[str, str, str, str, str, str]) -> tuple[Mutant, ...]:
  """Mutants whose files and tests lie in two folders."""
  return tuple(
    Mutant(promise, f'{folder}/{file}', old, new, f'{tests}/{test}', only)
    for promise, file, old, new, test, only in mutants
  )


MUTANTS = _of(
  'pallas_kernels', 'tests/pallas_kernels',
  ('bytes of a pass are those that it moves', 'gated_activation/costs.py', '(hidden + z) * wide + z * written',
   'hidden * wide + z * written', '../sparse24_jax/block_plan_test.py', 'are_what_runs'),
  ('True is kept', 'two_of_four/prune.py', '(b < n) & (x >= 0)', '(b >= n) & (x >= 0)',
   'two_of_four/prune_test.py', 'by_hand'),
  ('ties go to the lower index', 'two_of_four/prune.py', 'later_wins = a[j] > a[i]', 'later_wins = a[j] >= a[i]',
   'two_of_four/prune_test.py', 'ties_go_to_the_lower'),
  ('a NaN is never kept', 'two_of_four/prune.py', '(b < n) & (x >= 0)', '(b < n)',
   'two_of_four/prune_test.py', 'any_bits'),
  ('weights are ranked by magnitude', 'two_of_four/prune.py', ' & jnp.array(jnp.iinfo(integer).max, integer)',
   ' | jnp.array(0, integer)', 'two_of_four/prune_test.py', 'any_bits'),
  ('the soft threshold takes the second smallest off', 'two_of_four/prune.py', 'size - t, zero', 'size, zero',
   'two_of_four/prune_test.py', 'against_float64'),
  ('the scale minimises the squared error', 'two_of_four/prune.py', 'jnp.sum(wide * soft, axis=matrix) /',
   'jnp.sum(wide * wide, axis=matrix) /', 'two_of_four/prune_test.py', 'minimises'),
  ('the transposable mask is the optimum', 'two_of_four/transposable.py', 'x[0] + y[0], x[1] | y[1]',
   'x[0] + 0.9 * y[0], x[1] | y[1]', 'two_of_four/transposable_test.py', 'optimum'),
  ('of equal sums the first pattern wins', 'two_of_four/transposable.py', 'where(score > best, other',
   'where(score >= best, other', 'two_of_four/transposable_test.py', 'ties_go_to_the_first'),
  ('MVUE is unbiased', 'two_of_four/mvue.py', '  value = jnp.where(any_dominant, rest_total, half)',
   '  value = jnp.where(any_dominant, rest_total, total)', 'two_of_four/mvue_test.py', 'mean_over_keys'),
  ('MVUE keeps two of four', 'two_of_four/mvue.py', '(start <= point) & (point < end)\n    second',
   'start <= point\n    second', 'two_of_four/mvue_test.py', 'any_bits'),
  ('the format of a group is low | high << 2', 'formats.py', 'low_at | high_at << 2', 'low_at << 2 | high_at',
   'formats_test.py', 'bytes_by_hand'),
  ('FP8 goes where a kernel takes 8 bits', 'arch.py', 'k.op == op and itemsize in k.itemsizes', 'k.op == op',
   'arch_test.py', 'fp8_takes_a_kernel'),
  ('metadata is in the order of the tensor cores', 'operand.py', 'half = x[..., 0] | x[..., 1] << 8',
   'half = x[..., 1] | x[..., 0] << 8', 'operand_test.py', 'metadata_means'),
  ('V:N:M ranks columns by their sums', 'vnm/reference.py', 'columns // m, m).sum(axis=-3)',
   'columns // m, m).max(axis=-3)', 'vnm/format_test.py', 'against_loops'),
  ('kernels of sources that have changed since serve no other process', '_disk_cache.py', 'if _files() == _IMPORTED:',
   'if True:', 'disk_cache_test.py', 'sources_that_changed'),
  ('a compiled kernel is loaded only on a machine like the one that compiled it', 'mosaic/compiled.py',
   'platform_version, flags, _processors()]', 'platform_version, flags]', 'compiled_test.py', 'another_machine'),
  ('V:N:M keeps the largest of a row', 'vnm/reference.py', 'jnp.where(columns, order, -1)',
   'jnp.where(columns, 1, -1)', 'vnm/format_test.py', 'against_loops'),
  ('FP8 scales bring the largest entry to the largest value', 'quantize/api.py', 'jnp.float32(largest) / bounded',
   '1 / bounded', 'quantize/api_test.py', 'brings_the_largest'),
) + _of(
  'sparse24_jax', 'tests/sparse24_jax',
  ('masks lie along the input axis', 'masks.py', 'magnitude_mask(w: Array, *, n: int = 2, m: int = 4, axis: int = -2)',
   'magnitude_mask(w: Array, *, n: int = 2, m: int = 4, axis: int = -1)', 'masks_test.py', 'defaults'),
  ('a refresh does not hide a NaN', 'projections.py', 'jnp.where(_holds_nan(w, divisor), mask, search(w))', 'search(w)',
   'projection_test.py', 'hide_nan'),
  ('the scale of S-STE is frozen', 'projections.py', 'refresh=lambda w, scale: scale',
   'refresh=lambda w, scale: soft_threshold_scale(w, axis=axis)', 'projection_test.py', 'only_by_refresh'),
  ('pruned weights decay, kept ones do not', 'optim/masked_decay.py',
   'jnp.where(mask, update.astype(dtype), moved.astype(dtype))',
   'jnp.where(mask, moved.astype(dtype), update.astype(dtype))',
   'optim/masked_decay_test.py', 'formula'),
  ('a small decay is not lost in few bits', 'optim/masked_decay.py', 'dtype = wider(update, w)', 'dtype = update.dtype',
   'optim/masked_decay_test.py', 'small_decay_arrives'),
  ('decay on weights is times the learning rate', 'optim/sparse_training.py', 'masks, -rate * decay)', 'masks, -decay)',
   'optim/sparse_training_test.py', 'learning_rate'),
  ('no decay in the dense phase', 'optim/sparse_training.py', "decays = recipe.decays and phase == 'sparse'",
   'decays = recipe.decays', 'optim/sparse_training_test.py', 'absent_from_the_dense'),
  ('masks are refreshed every so many steps', 'optim/sparse_training.py',
   '(count % recipe.refresh_every == 0)',
   '(count % recipe.refresh_every == 1)',
   'optim/sparse_training_test.py', 'masks_change_when_due'),
  ('masks come from the updated weights', 'optim/_search.py',
   'jax.lax.optimization_barrier(optax.apply_updates(params, updates))', 'jax.lax.optimization_barrier(params)',
   'optim/sparse_training_test.py', 'masks_change_when_due'),
  ('state counts optimizer steps and survives MultiSteps', 'optim/sparse_training.py',
   'count = optax.safe_increment(state.count)', 'count = optax.safe_increment(state.count) + 1',
   '../conformance_test.py', 'accumulated'),
  ('pruned weights of moving links are zero', 'optim/_evolve.py', 'return -w.astype(wider(u, w))',
   'return 0 * w.astype(wider(u, w))', 'optim/dynamic_sparse_test.py', 'pruned_weights_and_their_moments'),
  ('links that come start with moments of zero', 'optim/_evolve.py',
   'jnp.where(reset, jnp.zeros((), moment.dtype), moment)', 'moment', 'transposable_topology_test.py', 'start_at_zero'),
  ('a note of a clip is in the table of check', 'integration/check.py', "notes.append(f'WARNING  {said}')", 'pass',
   'binding/check_test.py', 'notes_of_clips'),
  ('weights that one program changes have names of one form', 'optim/_evolve.py',
   "re.sub(r'\\d+', '', context.path)", "''", 'optim/dynamic_sparse_test.py', 'of_other_names'),
  ('weights that one program changes draw links of their own', 'optim/_evolve.py', 'context._replace(word=word)',
   'context', 'optim/dynamic_sparse_test.py', 'each_changes_as_by_itself'),
  ('links rest where gradients are not finite', 'optim/_evolve.py', 'lambda _: _all_finite(gradients)',
   'lambda _: jnp.ones((), jnp.bool_)', 'optim/dynamic_sparse_test.py', 'skips_a_step'),
  ('links grow by the dense gradient', 'topology.py', 'keep_largest(grad, by_gradient', 'keep_largest(w, by_gradient',
   'topology_test.py', 'gradient_growth'),
  ('STEP holds the second moment', 'optim/step_adam.py', 'StepAdamState(count, mu, state.nu, state.changes)',
   'StepAdamState(count, mu, mu, state.changes)', 'optim/step_adam_test.py', 'held_to_the_bit'),
  ('step_adam has the phase of the recipe around it', 'optim/step_adam.py',
   'around := _around.get()) not in (None, phase)', 'around := None)', 'optim/step_adam_test.py',
   'phase_of_the_recipe_around'),
  ('the flip rate counts what changed', 'metrics.py', 'jnp.sum(a != b,', 'jnp.sum(a & ~b,',
   'metrics_test.py', 'counts'),
  ('a rate that nothing was compared for is no zero', 'optim/_training_state.py', 'rate == NOT_COMPARED, jnp.nan, rate',
   'rate == NOT_COMPARED, 0.0, rate', 'optim/sparse_training_test.py', 'no_rate_is_reported'),
  ('a state holds no bad number before a rate is measured', 'optim/_training_state.py', 'NOT_COMPARED = -1.0',
   "NOT_COMPARED = float('nan')", 'optim/sparse_training_test.py', 'unknown_at_first'),
  ('a step of a dense end is told apart', 'optim/sparse_training.py',
   'checkpoint_name(state.count, DENSE_UPDATE)', 'state.count',
   'integration/check_step_test.py', 'dense_by_design'),
  ('a dense phase is no error of check_step', 'integration/check_step.py',
   'PHASES if has_dense_update(traced.jaxpr) else', "('sparse',) if has_dense_update(traced.jaxpr) else",
   'integration/check_step_test.py', 'dense_by_design'),
  ('a dense phase reads no masks', 'integration/check_step.py', '_masked(update) if', 'None if',
   'integration/check_step_models_test.py', 'not_sparsified_again'),
  ('each of several optimizers is checked by its own gradient', 'integration/step_weights.py',
   "default='') if several else ''", "default='') if False else ''",
   'integration/check_step_test.py', 'two_optimizers'),
  ('a step that reads none of its weights is an error', 'integration/check_step.py', 'if unread := [', 'if False and [',
   'integration/check_step_test.py', 'of_several'),
  ('masks of another optimizer are found', 'integration/check_step.py', 'if len(masks) > 1 else folders',
   'if False else folders',
   'integration/check_step_test.py', 'two_optimizers'),
  ('a mask that is chosen in the step counts', 'integration/functional.py', "named_one('chosen', path,",
   "named_one('chosen', '',", 'integration/check_step_test.py', 'goes_on_sparse'),
  ('a rule in FP8 is read in FP8', 'integration/check_step.py', "if of.asked == 'fp8' and", 'if False and',
   'integration/check_step_test.py', 'read_in_fp8'),
  ('a step without masks is not taken for a dense one', 'integration/check_step.py',
   'if not has_dense_update(traced.jaxpr):', 'if False:',
   'integration/check_step_test.py', 'without_masks'),
  ('a recipe that replaces another takes all its names', 'recipes/_registry.py', 'if of.make is replaced', 'if False',
   'recipes/new_recipe_test.py', 'that_was_changed'),
  ('a number that no gradient has is no parameter', 'rules.py', 'or_numbers and isinstance(leaf, float | complex)',
   'or_numbers and isinstance(leaf, int | float | complex)', 'bad_setup_test.py', 'test_sparse_training'),
  ('few rows of an expert are not none', 'binding/reading.py', 'rows / math.prod', 'rows // math.prod',
   'binding/stacks_test.py', 'told_to_run_dense'),
  ('a changed script replaces its recipe', 'recipes/_registry.py', 'known.spec is not None and taken.spec',
   'taken.spec', 'recipes/new_recipe_test.py', 'that_was_changed'),
  ('what has no masks may go without a search', 'optim/sparse_training.py',
   'if unmasked:',
   'if rests:', 'optim/refresh_test.py', 'nothing_to_choose'),
  ('what has one mask may not', 'optim/_weights.py', 'return any(jax.tree.leaves(searched))',
   'return all(jax.tree.leaves(searched))', 'optim/refresh_test.py', 'one_weight_with_a_mask'),
  ('a scale that is chosen anew is a search', 'projection.py', 'kept = projection.refresh(w, state) is state',
   'kept = isinstance(projection.form, SoftThreshold)', 'optim/refresh_test.py', 'chosen_anew'),
  ('what one device holds whole is not divided', 'binding/blocks.py', 'if _places(params)]', ']',
   'binding/bound_test.py', 'divided_hidden_layer'),
  ('clusters that rest are no search', 'clusters.py', 'return state if new is scale else', 'return',
   'clusters_test.py', 'not_searched_anyway'),
  ('a default that is written out is the same', 'projection.py', '    bound.apply_defaults()\n', '',
   'projection_test.py', 'one_object'),
  ('one of four is verified as such', 'integration/functional.py', 'n = form.n if isinstance(form, Masked) else 2',
   'n = 2', 'integration/functional_test.py', 'one_of_four'),
  ('updates divided otherwise are followed', 'binding/_jax.py', "'pvary', 'reshard',", "'pvary',",
   'integration/check_step_test.py', 'divided_otherwise_and_then'),
  ('an alternative that matches nothing is told', 'alternatives.py', 'return not _REPEATED.search(pattern) or',
   'return False and', 'rules_test.py', 'matches_nothing_is_told'),
  ('decay that is clipped with gradients is found', 'optim/_chain.py',
   'return masks[0] if _others_differ(step, calls, masks[0], ours) else None', 'return None',
   'optim/chain_test.py', 'clipped_with_gradients'),
  ('a clip in front of links that come and go is found', 'optim/_chain.py',
   'is_sparse and _others_differ(step, calls, path, ours)', 'False', 'optim/chain_test.py', 'in_front_of_links'),
  ('check is not ok of a recipe that has to be bound', 'integration/check.py', 'not self.unbound and all(', 'all(',
   'binding/check_test.py', 'recipe_is_not_bound'),
  ('axes of an unbound recipe are found', 'integration/check_optimizer.py', 'if taken != weight.layout:', 'if False:',
   'binding/check_test.py', 'not_bound'),
  ('numbers of e4m3 are those of the step', 'optim/_left.py', '(rest == 0) & (squares', '(rest < 0) & (squares',
   'optim/left_test.py', 'fewer_bits'),
  ('zeros are no numbers of e4m3', 'optim/_left.py', '& (squares > 0)', '& (squares >= 0)', 'optim/left_test.py',
   'zeros_are'),
  ('a scale serves an average', 'optim/_left.py', 'or missed >= _OTHERS)', 'or missed)', 'optim/left_test.py',
   'average_of_weights_is_warned'),
  ('a line is that of the model', 'binding/_jax.py', 'if not _IN_A_LIBRARY.search(line):', 'if True:',
   'integration/check_step_models_test.py', 'lines_of_their_calls'),
  ('a dense step without a search reads no masks', 'optim/sparse_training.py', 'searches = not rests or',
   'searches = True or', 'integration/dense_phase_test.py', 'that_of_dense'),
  ('a dense phase keeps layers in FP8', 'recipe.py', 'if all(rule.is_plain for rule in rules):', 'if True:',
   'integration/dense_phase_fp8_test.py', 'dense_ones_in_fp8'),
  ('swapped arguments are told', 'binding/tracing.py', 'any(_holds_weights(recipe, other) for other in args)', 'False',
   'binding/check_test.py', 'another_order'),
  ('a missing argument is told', 'recipes/_registry.py', 'if name not in (*list(known)',
   'if name not in (*known, *list(known)', 'recipe_test.py', 'missing_argument'),
  ('each leaf draws its own sample', 'optim/mvue_gradients.py', 'jax.random.fold_in(step_key, i)', 'step_key',
   'optim/mvue_gradients_test.py', 'draw_differently'),
  ('sampling needs a key', 'mvue.py', 'if key is None:', 'if not weight_grad:', 'ffn_test.py', 'needs_a_key'),
  ('output gradients are sampled along tokens', 'linear_layer.py', 'mvue24(rows, key, axis=-2',
   'mvue24(rows, key, axis=-1', 'dot_test.py', 'three_matmuls'),
  ('the weight gradient passes straight through', 'dot.py', '  return dx, dw, None, None, None',
   '  return dx, dw * (projected != 0), None, None, None', 'dot_test.py', 'three_matmuls'),
  ('a projected tree passes gradients straight through', 'projection.py', '*primals), tangents[0]',
   '*primals), tangents[0] / 2', 'integration/functional_test.py', 'straight_through'),
  ('and so in the second derivative', 'projection.py', 'return straight_through(projection, *primals)',
   'return projection.apply(*primals)', 'integration/functional_test.py', 'every_derivative'),
  ('a step that reads a masked weight dense is found', 'binding/flow.py', 'operand.sparse - operand.dense',
   'operand.sparse | operand.dense', 'integration/check_step_test.py', 'evaluated_beside'),
  ('a dense read of a weight to which something was added is found', 'binding/flow.py', 'operand.dense | operand.near',
   'operand.dense', 'integration/steps_with_mistakes_test.py', 'NearTest'),
  ('a step that returns the old state is found', 'binding/flow.py', 'for weight in mark.states if weight.update)',
   'for weight in mark.states)', 'integration/steps_with_mistakes_test.py', 'LostState'),
  ('the longest path of a weight that ends an argument is meant', 'integration/step_weights.py',
   'key=lambda weight: len(weight.path)', 'key=lambda weight: -len(weight.path)',
   'integration/steps_with_mistakes_test.py', 'TreesTest'),
  ('each step of a program is followed', 'binding/flow.py', 'if updated := _updated(mark.dense, found.updates):',
   'if False:', 'integration/check_step_test.py', 'python_loop'),
  ('a fused hidden layer keeps its sharding constraint', 'ffn.py', 'if self.sharding is None:',
   'if True:', 'binding/transform_test.py', 'sharding_constraint'),
  ('masks of an update before are found', 'integration/check_step.py', '  if of_updates and', '  if False and',
   'integration/check_step_test.py', 'made_once'),
  ('keys that XLA reads from places are one kernel', 'binding/keys.py',
   'hidden = jax.lax.optimization_barrier(jnp.uint32(place))', 'hidden = jnp.uint32(place)', 'binding/keys_test.py',
   'knows_no_place'),
  ('an update that may be none leaves the masks as they are', 'binding/flow.py', 'if not all(w in mark.updates',
   'if not any(w in mark.updates', 'integration/check_step_test.py', 'made_once'),
  ('a gate of zeros and ones is no learning rate behind the wrapper', 'binding/gates.py',
   'return any(map(may_be_gate, operands[1:]))', 'return False', 'integration/check_step_test.py', 'let_through'),
  ('check shows the zeros of links that come and go at the density of a run', 'optim/_weights.py',
   'if p.update is None:', 'if p is not None:', 'binding/check_test.py', 'zeros_of_their_density'),
  ('links are held to the density of the end', 'integration/functional.py', 'if found > links', 'if found < links',
   'integration/functional_test.py', 'density_of_the_end'),
  ('zeros are looked for along the axis that a projection packs', 'integration/functional.py',
   '(form.axis,) if isinstance(form, SoftThreshold)', '(-2,) if isinstance(form, SoftThreshold)',
   'binding/check_test.py', 'along_its_outputs'),
  ('neighbours of several axes of tokens are told', 'activation_sparsity.py', 'for size in lead) > 1:',
   'for size in lead) > 9:', 'activation_sparsity_test.py', 'neighbours'),
  ('updates that are multiplied behind the wrapper are found', 'binding/flow.py', 'none if may_be_gate(',
   'none if True or may_be_gate(', 'integration/check_step_test.py', 'multiplied_behind'),
  ('a dense model is seen around the branch of a sparse step', 'optim/_identity.py', "if nearest == {'dense'} and",
   'if False and', 'integration/identity_test.py', 'in_a_branch'),
  ('project guesses no axes', 'binding/bound.py', 'len(shapes[path]) == 2 and ', '',
   'integration/functional_test.py', 'nothing_tells'),
  ('project waits for what is still computed', 'integration/functional.py', 'wait=True', 'wait=False',
   'integration/functional_test.py', 'still_computed'),
  ('only what reaches the gradient makes a step sparse', 'integration/step_weights.py',
   'if mine or names & {weight.name for weight in touched}:', 'if mine:',
   'integration/check_step_test.py', 'evaluated_beside'),
  ('a second derivative is an error that says so', 'dot.py', 'x, w = once((x, w))', 'x, w = (x, w)',
   'dot_test.py', 'second_derivatives'),
  ('the mask of a transpose is transposed', 'binding/transform.py', 'return state if reading.layout == layout else',
   'return state if True else', 'binding/transform_test.py', 'and_its_transpose'),
  ('a backward pass is no other direction of a model', 'binding/bound.py', 'layout.turned and not backward):',
   'layout.turned):', 'binding/bound_test.py', 'backward_pass'),
  ('a forward refuses states of other weights', 'binding/transform.py', 'if stale is None else', 'if True else',
   'integration/stale_variables_test.py', 'used_for_ever'),
  ('sparse activations are not priced as two layers', 'where_it_pays.py', 'if rule.activation is not None]:',
   'if rule.activation is True]:', 'only_where_it_pays_test.py', 'choose_for_themselves'),
  ('the plan that is priced is the one that runs', 'availability.py', 'dataclasses.replace(target(), priced=True)',
   'target(target().device.slug)', 'where_it_pays_test.py', 'what_is_installed'),
  ('a named implementation is priced', 'plan.py', 'if named is not None:\n    found',
   'if False:\n    found', 'where_it_pays_test.py', 'as_it_runs'),
  ('blocks are those that bind found', 'only_where_it_pays.py', 'if known is None else', 'if True else',
   'only_where_it_pays_test.py', 'knows_its_blocks'),
  ('a block is priced as the matrices that it multiplies', 'only_where_it_pays.py', 'rules[path].policy.of_matrix',
   'rules[path].policy', 'only_where_it_pays_test.py', 'knows_its_blocks'),
  ('a matmul is priced as the problem that runs', 'precision.py', '(d_in, tokens, d_out)', '(d_out, tokens, d_in)',
   'block_plan_test.py', 'are_what_runs'),
  ('a pass takes the back ends of its plan', 'precision.py',
   'scale, origin=origin, dtype=self.sample_dtype, implementation=self.pass_backends',
   'scale, origin=origin, dtype=self.sample_dtype',
   'block_plan_test.py', 'are_what_runs'),
  ('a pass of sparse activations takes those of its plan', '_activation_kernels.py',
   'return transpose_pack(_operand(a), implementation=self.plan.pass_backends, **options)',
   'return transpose_pack(_operand(a), **options)', 'activation_matmuls_test.py', 'all_passes'),
  ('plans know no precision by its name', 'plan.py', 'PRECISIONS[policy.precision]\n  if wrong',
   "FP8 if policy.precision == 'fp8' else NATIVE\n  if wrong", 'precision_test.py', 'prices_it'),
  ('a block has one policy', 'block_gain.py', 'if policies[name] != policy and not',
   'if policies[name] is None and not', 'block_gain_test.py', 'several_policies'),
  ('a block may sample all but the last gradient', 'ffn.py', "keys['down'] if static.plan.down.sampled else None",
   "keys['down']", 'ffn_test.py', 'last_weight_alone'),
  ('exact gradients are those of the weights that are named', 'recipe.py', "weight_grad='dense') if whole else",
   "weight_grad='dense') if self.exact else", 'exact_gradients_test.py', 'named_and_sparse'),
  ('a pattern of exact gradients that takes none is told', 'rules.py',
   'any(re.fullmatch(pattern, path) for path in matched)', 'any(re.fullmatch(pattern, path) for path in weights)',
   'exact_gradients_test.py', 'takes_none'),
  ('a block whose last gradient is exact is priced as it runs', 'only_where_it_pays.py',
   "Rule('down/.*', policies[block.down])", "Rule('down/.*', policies[first])", 'only_where_it_pays_test.py',
   'priced_as_it_runs'),
  ('exact gradients of divided rows are added up', 'linear_layer.py',
   "precision.scales else ()), shard.sum(dw, 'k')\n  origin", 'precision.scales else ()), dw\n  origin',
   'mesh_test.py', 'in_16_bits'),
  ('steps stand in the order in which they run', 'block_plan.py', 'in reversed(hidden)', 'in hidden',
   'block_plan_test.py', 'not_fused_are_what_runs'),
  ('steps say what they keep', 'layer_plan.py', 'x * self.precision.width(self.wide)', 'x * self.wide',
   'block_plan_test.py', 'what_dot_runs'),
  ('a block that no kernel serves says why', 'block_plan.py', 'return why[0] if all(why) else None', 'return None',
   'block_gain_test.py', 'all_dense'),
  ('the fastest way is advised', 'block_gain.py', 'min(gains, key=gains.__getitem__)', "'dense bfloat16'",
   'block_gain_test.py', 'fastest_is_advised'),
  ('FP8 that is simulated says so', 'block_gain.py', 'if block.simulated is not None:', 'if False:',
   'block_gain_test.py', 'simulated'),
  ('no recipe takes the name of another', 'recipes/_registry.py', 'and _differ(taken, known)', 'and False',
   'recipes/new_recipe_test.py', 'cannot_be_known'),
  ('no recipe takes the name of another of its module', 'recipes/_registry.py', 'return a.__code__ != b.__code__',
   'return False', 'recipes/new_recipe_test.py', 'twice_in_a_module'),
  ('FP8 stays on the kernel where a share of the tokens may measure so', 'plan.py', 'None if all(api.chosen',
   'None if any(api.chosen', 'block_gain_test.py', 'shares_of_tokens'),
  ('a block has one activation policy', 'block_gain.py', 'or any(other != policy for other in others):',
   'or False:', 'block_gain_test.py', 'both_weights_or_refused'),
  ('masks that fit are carried over', 'optim/carry_over.py', 'before[path] if path in kept else s', 's',
   'optim/carry_over_test.py', 'another_layer'),
  ('masks of another projection are not carried over', 'optim/carry_over.py',
   'and old.layouts.describe(path) == new.layouts.describe(path)', '',
   'optim/carry_over_test.py', 'another_projection'),
  ('layers that are alike are traced once, whatever they are called', 'mvue.py',
   "weight_grad == 'dense' or (key is not None and tokens_of(x) % 4 == 0)", 'False', 'dot_test.py', 'traced_once'),
  ('an op that is traced once has the line of its call', 'binding/_jax.py', 'calls[max(ops, default=0) :]', 'calls',
   'integration/check_step_test.py', 'layers_alike'),
  ('a state that was refused stays so', 'optim/_left.py', 'worst > _MOST_MISSED, worst', 'False, worst',
   'optim/carry_over_test.py', 'set_between_steps'),
  ('a state of another recipe is refused', 'optim/_identity.py', 'return jnp.all(identity.made_by == own.ravel())',
   'return True', 'integration/identity_test.py', 'tree_of_another'),
  ('a state says of which phase its last step was', 'optim/sparse_training.py',
   '_identity.after_step(state.identity, phase)', 'state.identity',
   'integration/identity_test.py', 'one_trace'),
  ('an update by the masks of another recipe is NaN', 'optim/sparse_training.py',
   'updates = _unless_other(fits, projections, updates)', 'pass', 'integration/identity_test.py', 'tree_of_another'),
  ('a dense end is no dense start', 'optim/_identity.py', "if phase == 'dense':\n    after", "if False:\n    after",
   'integration/identity_test.py', 'no_dense_start'),
  ('weights that are loaded after init are seen by a step that chooses no masks', 'optim/sparse_training.py',
   'unmended = unmasked |', 'unmended = False |',
   'optim/left_test.py', 'loaded_after_init'),
  ('flip rates of soft thresholds are measured in their turn', 'optim/sparse_training.py', '~unmended)) & searched',
   '~unmended))', 'optim/refresh_test.py', 'out_of_turn'),
  ('weights that came to a dense step are known to the next sparse one', 'optim/_left.py',
   'missed += jnp.where(unserved, 0.5, 0.0)', 'missed += 0', 'optim/left_test.py', 'before_a_dense_start'),
  ('branches for two phases close over one state', 'optim/_identity.py', 'for at, phase in notes if at() is program}',
   'for at, phase in notes}', 'integration/identity_test.py', 'branches_for_two'),
  ('weights that are others altogether are refused', 'optim/_left.py', 'others & refused |',
   'others & False |', 'optim/left_test.py', 'others_altogether'),
  ('weights of another step are refused, whose differences cancel in a sum', 'optim/_left.py',
   'others = moved > squares * _FAR**2', 'others = jnp.abs(changes[:, 0]) > jnp.sqrt(squares) * 0.25',
   'optim/left_test.py', 'another_step'),
  ('an average that is evaluated hides no mistake elsewhere', 'optim/_training_state.py',
   "tx.init(params){without}', 'sparse24_jax', logging.WARNING, _dispatch.lines_of_calls(),",
   "tx.init(params){without}', 'sparse24_jax', logging.WARNING,",
   'integration/functional_test.py', 'hides_no_mistake'),
  ('an nnx model does not train on the masks of other weights', 'integration/nnx_states.py',
   'states |= jax.lax.cond(stale, anew, lambda kept: kept, kept) if kept else {}', 'states |= kept',
   'integration/nnx_states_test.py', 'owns_its_step'),
  ('a step of an nnx model is one program in all processes', 'integration/nnx_states.py',
   'for path in projections if path in {*of_optimizer, *chosen}', 'for path in {*of_optimizer, *chosen}',
   'integration/nnx_states_test.py', 'in_their_order'),
  ('zeros are verified along what a matmul contracts', 'integration/functional.py',
   'layout.matrix(weights[path])', 'weights[path]', 'integration/functional_test.py',
   'along_the_axes'),
  ('layers for one token are a block', 'binding/values.py', '(*range(b), *range(x, x + w - b), *range(b, x))',
   'tuple(range(x + w - b))', 'binding/bound_test.py', 'one_token'),
  ('tokens of a block keep their places', 'binding/reading.py', 'if tuple(order) != tuple(range(len(order))):',
   'if False:', 'binding/pairs_test.py', 'projected_weights'),
  ('a bias behind a transpose is one of columns', 'binding/interpreter.py', 'order[row.axis] == len(order) - 1',
   'row.axis == len(order) - 1', 'binding/block_order_test.py', 'neighbours_are'),
  ('a derivative that is transposed is another one', 'binding/activations.py',
   'if order_of(out) in (None, tuple(range(out.aval.ndim)))', 'if True', 'binding/bound_test.py', 'another_one'),
  ('gate and up read the same inputs', 'binding/blocks.py', ' or _of_other(root) != _of_other(roots[0])', '',
   'binding/bound_test.py', 'contract_other_axes'),
  ('some layers of a stack have masks of their own', 'binding/calls.py', 'outer.view.entry(i)', 'outer.view.entry(0)',
   'binding/stacks_test.py', 'each_way'),
  ('a scan hands weights back as they came', 'binding/calls.py', 'if v.mark and v.array is s.array', 'if False',
   'integration/nnx_functions_test.py', 'projected_weights'),
  ('a variable with two names is one in check_step', 'integration/nnx_functions.py',
   'one.setdefault(id(original), nodes[i])', 'one.setdefault(i, nodes[i])', 'integration/check_step_models_test.py',
   'twice'),
  ('a shard cuts no group', 'binding/shards.py', '    if size % divisor:', '    if False:',
   'binding/shard_map_test.py', 'cuts_groups'),
  ('shards draw samples of their own', 'binding/transform.py', '      key = jax.random.fold_in(key, index)',
   '      pass', 'binding/shard_map_test.py', 'own_sample'),
  ('gate and up of divided weights are sampled apart', 'linear_layer.py', '(0, row, column + i * gap)',
   '(0, row, column)', 'linear_layer_test.py', 'columns_of_the_whole'),
  ('devices add what they have of an input gradient', 'linear_layer.py',
   "shard.sum(precision.input_grad(w, given, backend=backend, dtype=dtype), 'k')",
   'precision.input_grad(w, given, backend=backend, dtype=dtype)', 'mesh_test.py', 'packed_gate_and_up'),
  ('gate and up of a composed block are sampled apart', 'ffn.py', "keys['hidden'], weights['up'].shape[1])",
   "keys['hidden'])", 'ffn_test.py', 'columns_of_one_sample'),
  ('a matmul notes no maximum of dh that nobody reads', 'fp8.py', 'return self.notes_amax and _steepest(',
   'return self.notes_amax or _steepest(', 'fp8_ffn_test.py', 'note_what_is_largest'),
  ('a dense matmul notes no maximum', 'block_plan.py', 'scaled=noting and self.up.backends.forward is not None',
   'scaled=noting', 'block_plan_test.py', 'notes_nothing'),
  ('sums beside matmuls are warned of in a function that was not bound', 'binding/transform.py',
   'in itertools.chain.from_iterable(beside.notes.values())', 'in ()', 'binding/beside_test.py', 'bound_one_too'),
  ('devices share the scale of a gradient', 'fp8.py', "gated=gated), 'n', 'm')", "gated=gated), 'n')",
   'linear_layer_test.py', 'scale_of_a_gradient'),
  ('no FP8 matmul reads a weight under a transposable mask dense', 'fp8.py',
   "() if form == TransposableMasked() else ('forward',)", "('forward',)", 'fp8_transposable_test.py', 'three_take'),
  ('which half of a weight is the gate', 'binding/blocks.py', 'key=lambda each: each[0].columns or (0, 0)',
   'key=lambda each: 0', 'binding/pairs_test.py', 'is_found'),
  ('no norm of the dense weight is in what a sparse model computes', 'binding/beside.py', 'fine = name in _JOINS',
   'fine = True', 'binding/beside_test.py', 'matmuls_make'),
  ('a matrix that is mixed of experts is no sparse layer', 'binding/products.py',
   'if one.inputs or not other.inputs:', 'if True:', 'binding/products_test.py', 'is_warned_of'),
  ('queries for several heads are no mixed experts', 'binding/products.py', ' <= of(made, one.contract)', '',
   'binding/products_test.py', 'only_looks_alike'),
  ('a matmul written as a sum is no penalty', 'binding/beside.py', 'if is_other and (', 'if False and (',
   'binding/beside_test.py', 'another_name'),
  ('a matmul of one row at a time, written as a sum, is warned of', 'binding/beside.py', 'elif is_other and mark.data:',
   'elif False:', 'binding/beside_test.py', 'matmuls_make'),
  ('what nothing follows is told where no penalty has it', 'binding/beside.py', 'self.texts.intersection(sums)',
   '()', 'binding/beside_test.py', 'no_part'),
  ('inputs meet no weight that nothing follows', 'binding/beside.py', 'if equation.outvars and (found.data',
   'if False and (found.data', 'binding/beside_test.py', 'no_part'),
  ('a loss over a norm is no penalty if it is all', 'binding/beside.py', 'or len(results) == 1) and', 'or False) and',
   'binding/beside_test.py', 'matmuls_make'),
  ('sums over weights are followed round a loop', 'binding/beside.py', 'if grown == list(carried):', 'if True:',
   'binding/beside_test.py', 'matmuls_make'),
  ('what stands in no block says why', 'binding/interpreter.py', '    found.matmuls.apart(block.maps, block.reason)',
   '    pass', 'binding/bound_test.py', 'why_matmuls'),
  ('FP8 rounds output gradients to e5m2', 'fp8.py', "of_a = self.gradients if role == 'input_grad' else E4M3",
   'of_a = E4M3', 'dot_test.py', 'three_matmuls'),
  ('gradients in e4m3 are', 'fp8.py', 'current_scale(quantize.amax(dz), self.gradients)',
   'current_scale(quantize.amax(dz), E5M2)', 'fp8_test.py', 'gradients_in_e4m3'),
  ('what a matmul notes of h is its scale', 'ffn.py', 'keep=keep, amax=amax)', 'keep=keep)', 'fp8_ffn_test.py', 'note'),
  ('what a matmul notes of dh is its scale', 'fp8.py', '(quantize.amax(dh) if amax is None else amax)',
   'quantize.amax(dh)', 'fp8_ffn_test.py', 'note'),
  ('weights packed by the caller are not packed again', 'linear_layer.py',
   'plan.precision.packed_dtype(plan.dtype):\n    return state',
   'plan.precision.packed_dtype(plan.dtype):\n    state = state.state',
   'linear_layer_test.py', 'handed_over'),
  ('the first rule that matches decides', 'rules.py', 'rule for rule in recipe.rules if re.fullmatch',
   'rule for rule in reversed(recipe.rules) if re.fullmatch', 'rules_test.py', 'first_match'),
  ('a rule matches whole paths', 'rules.py', 're.fullmatch(rule.path, path)', 're.match(rule.path, path)',
   'rules_test.py', 'part_of_a_path'),
  ('a rule that decides nothing is an error', 'rules.py', 'if rule not in matched.values() and not',
   'if rule is None and not', 'rules_test.py', 'part_of_a_path'),
  ('a dense rule of what an earlier one makes sparse is an error', 'rules.py', 'return [] if any(is_weight(*each)',
   'return [] if () and any(is_weight(*each)', 'rules_test.py', 'dense_anyway'),
  ('a matmul reads its weight beside what nothing follows', 'binding/beside.py', 'if others.weights and (name :=',
   'if () and (name :=', 'binding/beside_test.py', 'what_nothing_follows_is_refused'),
  ('whether a weight is finite hides no other', 'binding/interpreter.py', 'any(marks) or asks_if_a_number(equation)',
   'any(marks)', 'binding/beside_test.py', 'hides_no_other'),
  ('an axis that explicit axes divide within joined ones is refused', 'rules.py', 'if AxisType.Explicit in getattr(',
   'if () in getattr(', 'rules_test.py', 'explicit_axes'),
  ('what nnx.capture captures in a sparsified model is given back', 'integration/nnx_functions.py',
   'or not _same(_leaves(v), before[path])', '', 'integration/nnx_calls_test.py', 'captured'),
  ('groups that straddle shards are refused by name', 'rules.py', 'if run % divisor:', 'if run < 0:',
   '../conformance_on_meshes_test.py', 'straddle'),
  ('masks of loaded weights do not wait beside links that come and go', 'optim/_evolve.py', '(due | missed, group)',
   '(due, group)', 'optim/left_test.py', 'beside_links'),
  ('a factor of a part of a weight is that of the part', 'binding/reading.py',
   'math.prod(run.size for run in reading.runs[batch:] if run.axis == axis) for axis in inside',
   'found.view.shape[axis] for axis in inside', 'binding/transform_test.py', 'read_in_part'),
  ('errors name the path of a weight', 'weight_errors.py',
   "raise WeightError(f'{\", \".join(paths)}: {error}', *paths) from error", 'raise',
   'float64_test.py', 'name_their_weight'),
  ('a phase begins at its step', 'schedules.py', 'if step < round(done * total_steps):',
   'if step <= round(done * total_steps):', 'schedules_test.py', 'boundaries'),
  ('a run has the steps that its recipe is made for', 'schedules.py',
   'if recipe.total_steps not in (None, total_steps):', 'if not recipe:', 'schedules_test.py', 'another_total'),
  ('a recipe that begins dense must be told the phase', 'recipe.py', "if names[0] == 'dense' and 'sparse' in names:",
   "if names[0] == 'dense' and not names:", 'bad_setup_test.py',
   'begins_dense_without'),
  ('methods that a decorator made are sparse in nnx models, too', 'integration/nnx_classes.py',
   "hasattr(type(found), '__get__')", 'inspect.isfunction(found)', 'integration/nnx_test.py', 'decorated_method'),
  ('a part of a sparse nnx model does not run dense', 'integration/nnx.py', 'if not computes(name, args, kwargs):',
   'if name:', 'integration/nnx_calls_test.py', 'part_called_from_outside'),
  ('a second sparsify keeps the states of an nnx model', 'integration/nnx.py', '    if path in known:',
   '    if path in {}:', 'integration/nnx_test.py', 'second_sparsify_keeps'),
  ('calls of an nnx model draw their own samples', 'integration/nnx_states.py', 'return self.rngs[RNG]()',
   'return jax.random.key(0)', 'integration/nnx_test.py', 'samples_differ_between'),
  ('what a call changes of an nnx model is put back', 'integration/nnx_functions.py', '    nnx.update(model, changed)',
   '    del changed', 'integration/nnx_calls_test.py', 'what_a_call_changes'),
  ('an nnx function that changes attributes is refused', 'integration/nnx_functions.py',
   'if nnx.graphdef(model) != graphdef:', 'if not graphdef:', 'integration/nnx_functions_test.py',
   'changes_attributes'),
  ('the largest feasible decay is chosen', 'tuning.py', 'best = feasible[-1]', 'best = feasible[0]', 'tuning_test.py',
   'largest_in_the_band'),
) + _of(
  'experiments', 'tests/experiments',
  ('a rate that nothing was compared for is null', 'runs/windows.py', 'None if rate < 0 else rate', 'rate',
   'runs/windows_test.py', 'null_before'),
  ('flip rates begin with the first comparison', 'runs/records.py', "if record['flip_rate'] is not None]", ']',
   'runs/records_test.py', 'rates_begin'),
  ('a checkpoint of another recipe is refused', 'runs/checkpoint.py',
   'for field in changed if not may_differ(field)]:', "for field in changed if field == '']:",
   'runs/checkpoint_test.py', 'differing_fields'),
  ('a changed value in a checkpoint is found', 'runs/checkpoint.py', "if meta['checksums'][path] != value]",
   "if path not in meta['checksums']]", 'runs/checkpoint_test.py', 'a_changed_value'),
  ('a run resumes bit for bit', 'runs/train.py', "self.iterator.set_state(meta['data_state'])", 'pass',
   'runs/stopping_test.py', 'bit_for_bit'),
  ('no memory or a failing disk is no damage', 'runs/checkpoint.py', 'if is_damage(error) or', 'if True or',
   'runs/checkpoint_test.py', 'says_nothing_about_the_content'),
  ('a jump of the loss is not saved', 'runs/train.py', 'self.windows.require_good(done)', 'pass',
   'runs/bad_numbers_test.py', 'told_to_stop'),
  ('what loses a race of another width may be advised', 'reports/guide_races.py',
   'far(winner.width, d) <= far(first.width, d)', 'far(winner.width, d) >= 0', 'reports/guide_test.py', 'nearest'),
  ('what loses a race is not advised', 'reports/guide_races.py', 'e.who == first.who and winner.who not in ran',
   'e.who == first.who and winner.who in ran', 'reports/guide_test.py', 'loses_to_a_rival'),
  ('what is pasted makes the weights sparse that the figures are of', 'reports/guide_code.py',
   "its.kwargs.get('path', FFN)", 'FFN', 'reports/guide_test.py', 'CodeTest'),
  ('a race of far wider models is not advised', 'reports/guide.py', 'not w.beaten_by and near(w.first.width, d)',
   'not w.beaten_by', 'reports/guide_test.py', 'far_wider'),
  ('what ran with another dense end than today is not advised', 'reports/guide.py', ' and not e.option.only]', ']',
   'reports/guide_test.py', 'tables_alone'),
  ('steps that two processes timed are no gain', 'reports/evidence.py', ' and best_steps.settled(methods[name])]', ']',
   'reports/guide_test.py', 'StepsTest'),
  ('a narrower block has the gain of its own width', 'reports/guide.py', 'narrowed(hidden, name))', 'hidden)',
   'reports/guide_test.py', 'narrower_block'),
  ('a race embeds every token of its text', 'runs/race/main.py', 'self.vocab = packed.vocab_size',
   'self.vocab = highest + 1', 'runs/race/race_test.py', 'vocabulary_is_that'),
  ('a race evaluates activations dense', 'runs/race/programs.py', 'recipe if trains else eval_recipe(recipe)', 'recipe',
   'runs/race/programs_test.py', 'trained_alone'),
  ('links of a race come and go over its own length', 'runs/race/contenders.py', 'MANY_STEPS / steps', '1.0',
   'runs/race/programs_test.py', 'schedules_of_a_run'),
  ('a block of tokens of several positions does not race', 'runs/race/programs.py',
   'batch % (block := rule.activation.features.block)', '(block := rule.activation.features.block) < 1',
   'runs/race/programs_test.py', 'blocks_of_sequences'),
  ('a dense end in 16 bits is another program', 'runs/race/main.py', "today.dense_phase != record.get('dense_phase')",
   'False', 'runs/race/race_test.py', 'in_16_bits'),
  ('a step is compared in its own session', 'reports/best_steps.py', "beside.setdefault('dense', ",
   "beside['dense'] = (", 'reports/best_steps_test.py', 'own_session'),
  ('a file of trials is of one text', 'runs/race/tuned.py', "if r.get('text') != text]", "if r.get('text') == '']",
   'runs/race/tuned_test.py', 'records_of_another_text'),
  ('a finished run of another text is no trial', 'runs/race/tuned.py', "run.summary.get('text') != text", 'False',
   'runs/race/tuned_test.py', 'folder_of_a_run_of_another'),
  ('a run without a method is not taken for dense', 'runs/records.py', "+ ('' if self.method else ', no method')", '',
   'reports/report_test.py', 'without_a_method'),
  ('an experiment that is data runs no code', 'runs/experiment.py', 'if base not in (known := known_experiments()):',
   'if not (known := base):', 'runs/durable_test.py', 'is_no_code'),
  ('a run writes into its own folder', 'runs/durable.py', 'flags | os.O_NOFOLLOW', 'flags', 'runs/durable_test.py',
   'a_link_in'),
  ('no link of a run folder is read or replaced', 'runs/metrics.py',
   'durable.require_own(folder / METRICS, folder / TIMING, board)', 'pass', 'runs/durable_test.py', 'a_link_in'),
  ('less than one percent above is not refuted', 'reports/claims.py', 'if ties and 0 < mean - half < margin:',
   'if False:', 'reports/claims_test.py', 'fst_against_dense'),
  ('all flip rates are of the same steps', 'reports/compare.py', 'run.flip_summary(end)', 'run.flip_summary()',
   'reports/report_test.py', 'same_step'),
  ('a record whose program is gone does not stand by itself', 'reports/provenance.py', 'found.append(GONE)', 'pass',
   'reports/pages_test.py', 'test_faults'),
  ('masks of a checkpoint are 2:4', 'runs/restored.py', 'zip(masks, counts, strict=True) if count > 2',
   'zip(masks, counts, strict=True) if count > 4', 'runs/restored_test.py', 'group_of_three'),
  ('only what a lost process looks like is one', 'runs/hosts.py', ' and _LOST.search(str(error))', '',
   'runs/hosts_test.py', 'lost_process_looks_like'),
  ('a row has as many masked tokens as all', 'runs/tasks/language.py', 'masked, how = rank < count,',
   'masked, how = rank <= count,', 'runs/tasks/tasks_test.py', 'what_is_masked'),
  ('a target is given one token late', 'runs/tasks/translation.py', 'np.concatenate([begin, target[:, :-1]], axis=1)',
   'target', 'runs/tasks/tasks_test.py', 'one_token_late'),
  ('the first token of a choice counts', 'runs/language.py', '(at >= len(item.context))', '(at > len(item.context))',
   'runs/language_test.py', 'by_sum_and_by_mean'),
)  # fmt: skip


def copy_of_repository(folder: Path) -> None:
  """The files that git tracks, as they are in the working tree, and those that it would."""
  listed = subprocess.run(
    ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT, check=True, capture_output=True
  )
  for name in filter(None, listed.stdout.decode().split('\0')):
    if (ROOT / name).is_file():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, folder / name)


SETTINGS = {
  'JAX_PLATFORMS': 'cpu', 'JAX_COMPILATION_CACHE_DIR': str(ROOT / '.jax_cache'), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
}  # fmt: skip


def import_what_no_mutant_changes() -> None:
  """So that the imports are paid for once: each run of tests is a fork of this process."""
  os.environ.update(SETTINGS)
  sys.dont_write_bytecode = True  # or Python takes a line changed within a second for the one before
  for name in ('flax.linen', 'flax.nnx', 'jax', 'optax', 'orbax.checkpoint'):
    importlib.import_module(name)


def run_tests(folder: Path, *arguments: str) -> tuple[int, str]:
  """pytest's status and the end of its output, of the project and the tests in `folder`."""
  with tempfile.TemporaryFile('w+') as output:
    child = os.fork()
    if not child:
      os.chdir(folder)
      os.dup2(output.fileno(), 1)
      os.dup2(output.fileno(), 2)
      sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
      for name in [name for name in sys.modules if name.split('.')[0] == 'tests']:
        del sys.modules[name]
      status = 2  # as pytest says that it was interrupted
      try:
        status = pytest.main(['-q', '-x', '-m', 'not slow', *arguments])
      except BaseException:
        traceback.print_exc()
      finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output.seek(0)
    return status, output.read()[-2000:]


def mutated(mutant: Mutant, root: Path) -> tuple[Path, str]:
  """The file of `mutant` and its text with the line changed.

  The line is known by what it says: it is found in another file of the package, too, and wrapped in another way.

  Raises:
    LookupError: it is not there, or more than once.
  """
  within = r'(?<=\S)\s+(?=\S)'  # indentation stays, or would be lost
  line = re.compile(r'\s+'.join(map(re.escape, re.split(within, mutant.old))))
  places = []
  for files in ([root / mutant.file], sorted((root / mutant.file.split('/')[0]).rglob('*.py'))):
    places = [(file, match) for file in files if file.is_file() for match in line.finditer(file.read_text())]
    if places:
      break
  if len(places) != 1:
    where = [str(file.relative_to(root)) for file, _ in places]
    raise LookupError(f'{mutant.old!r} has to be once in {mutant.file}; it is in {where}: change tests/mutants.py')
  (file, match), = places
  return file, match.string[:match.start()] + mutant.new + match.string[match.end():]


def verdict(folder: Path, mutant: Mutant) -> str:
  """'killed', or what happened instead."""
  try:
    file, changed = mutated(mutant, folder)
  except LookupError as error:
    return str(error)
  text = file.read_text()
  file.write_text(changed)
  try:
    status, output = run_tests(folder, mutant.tests, '-k', mutant.only)
  finally:
    file.write_text(text)
  # Of pytest: 0 all passed, 1 some failed, 5 none was selected; the others are errors of imports, say.
  return {0: 'SURVIVED', 1: 'killed', 5: 'no test of that name'}.get(status, f'pytest ended with {status}:\n{output}')


def main() -> int:
  parser = argparse.ArgumentParser(description='Runs fast tests against mutants of the project.')
  parser.add_argument('words', nargs='*', help='only mutants with one of these in promise or file')
  words = parser.parse_args().words
  chosen = [m for m in MUTANTS if not words or any(word in f'{m.promise} {m.file}' for word in words)]
  import_what_no_mutant_changes()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name).resolve()
    copy_of_repository(folder)
    alive = []
    # What fails as it is would kill anything.
    named = ' or '.join(sorted({f'({Path(m.tests).stem} and {m.only})' for m in chosen}))
    status, output = run_tests(folder, *sorted({m.tests for m in chosen}), '-k', named)
    if status:
      print(f'the tests do not pass without a mutant ({status}):\n{output}')
      return 1
    for mutant in chosen:
      found = verdict(folder, mutant)
      print(f'{found}: {mutant.promise} ({mutant.file}: {mutant.new.strip()!r})', flush=True)
      if found != 'killed':
        alive.append(mutant.promise)
  print(f'{len(chosen) - len(alive)} of {len(chosen)} mutants killed' + (f'; not: {alive}' if alive else ''))
  return bool(alive)


if __name__ == '__main__':
  sys.exit(main())
