"""The programs of a race: the steps of its contenders, against those of Optax and of experiments."""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.runs import build, experiment
from experiments.runs import programs as run_programs
from experiments.runs.race import contenders, programs, trials
from experiments.runs.race.search import Trial
import sparse24_jax as s24
from sparse24_jax.availability import target
from sparse24_jax.neuron_plan import plan_neurons
from tests.experiments.fakes import FakeData, TEXT


class ProgramsTest(absltest.TestCase):
  def made(self, name, batch=4):
    model = contenders.make_model(name, 'wide2048', 256, tiny=True)
    model = model.clone(config=dataclasses.replace(model.config, num_layers=1))
    text = np.frombuffer(TEXT.encode(), np.uint8)
    shape, held_out = jax.ShapeDtypeStruct(text.shape, text.dtype), np.zeros((2, batch), np.int32)
    contender = contenders.make_contender(name, tiny=True)
    return programs.Programs(model, contender, batch, shape, held_out), jnp.asarray(text)

  @pytest.mark.slow
  def test_an_unsampled_contender_draws_nothing(self):
    """Its gradient needs no random key."""
    unsampled = [name for name in contenders.CONTENDERS if name.endswith('_unsampled')]
    self.assertNotEmpty(unsampled)
    sampled = {name.removesuffix('_unsampled') for name in unsampled} & contenders.CONTENDERS.keys()
    for name in (*unsampled, *sorted(sampled)):
      made, _ = self.made(name)
      tokens, model = jnp.zeros((4, made.length), jnp.int32), s24.sparsify(made.model, made.described, phase='sparse')

      def loss(params, opt_state, made=made, tokens=tokens, model=model):
        states = s24.sparse_variables(params, opt_state, made.described, phase='sparse')
        return model.apply({'params': params, 'sparse24': states}, tokens).sum()

      draws = self.assertRaisesRegex(ValueError, 'mvue')
      with self.subTest(name), contextlib.nullcontext() if name in unsampled else draws:
        jax.eval_shape(jax.grad(loss), made.shapes.params, made.shapes.opt_state)

  @pytest.mark.slow
  def test_decay_on_weights_is_times_the_rate_of_the_step(self):
    made, text = self.made('sr_ste')
    step, state = jax.jit(made._step, static_argnums=(0, 1)), jax.jit(made._init)(jnp.int32(0))
    starts = jnp.arange(4, dtype=jnp.int32)
    after = [
      step('sparse', None, state, text, starts, programs.Numbers(rate, decay, jnp.int32(1), jnp.float32(10)))[0]
      for rate, decay in ((0.1, 0.0), (0.1, 0.5))
    ]
    layer, masks = (tree['h_0']['mlp'] for tree in (state.params, state.opt_state[1].projections))
    of_plain, of_decayed = (each.params['h_0']['mlp'] for each in after)
    for name in ('c_fc', 'c_proj'):
      w, mask, plain, decayed = (tree[name]['kernel'] for tree in (layer, masks, of_plain, of_decayed))
      np.testing.assert_allclose(plain - decayed, 0.1 * 0.5 * np.where(mask, 0, w), atol=1e-6)

  def test_fp8_lasts_to_the_end(self):
    for name in ('fst_fp8_all', 'fst'):
      made, _ = self.made(name)
      step, arguments = made.step_of('dense', False)
      trained = str(jax.make_jaxpr(step)(*arguments))
      evaluated = str(jax.make_jaxpr(functools.partial(made._evaluate, 'dense'))(*arguments[:2], made.held_out))
      # The largest numbers of e5m2 and e4m3.
      self.assertEqual(('57344.0' in trained, '448.0' in evaluated), (name == 'fst_fp8_all',) * 2)

  def test_a_burst_of_the_clock_has_its_share_of_searches(self):
    for name, contender in contenders.CONTENDERS.items():
      recipe = contender.make(1e-4, contenders.MANY_STEPS)
      self.assertEqual(contenders.SEARCH_EVERY % recipe.refresh_every, 0, name)

  def test_what_has_no_masks_is_one_program(self):
    found = {name: self.made(name)[0].refreshes for name in ('dense', 'fst', 's_ste_fp8', 's_ste_fp8_all')}
    self.assertEqual(
      found, {'dense': (None,), 'fst': (False, True), 's_ste_fp8': (False,), 's_ste_fp8_all': (False,)}
    )

  @pytest.mark.slow
  def test_a_dense_step_is_that_of_optax(self):
    made, text = self.made('dense')
    state, starts = jax.jit(made._init)(0), jnp.array([0, 7, 90, 200])

    def loss(params):
      rows = jnp.stack([text[i : i + 17] for i in [0, 7, 90, 200]]).astype(jnp.int32)
      logits = made.model.apply({'params': params}, rows[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    is_matrix = jax.tree.map(lambda p: p.ndim > 1, state.params)
    tx = optax.chain(
      optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)
    )

    @jax.jit
    def expected(params):
      value, grads = jax.value_and_grad(loss)(params)
      updates, _ = tx.update(grads, tx.init(params), params)
      return value, optax.apply_updates(params, updates)

    value, wanted = expected(state.params)
    numbers = programs.Numbers(jnp.float32(3e-3), jnp.float32(0.0), jnp.int32(0), jnp.float32(1))
    after, (found, _) = jax.jit(made._step, static_argnums=(0, 1))('dense', None, state, text, starts, numbers)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), after.params, wanted)

  @pytest.mark.slow
  def test_all_linear_layers_are_sparse_and_the_decay_is_an_argument(self):
    made, text = self.made('fst_all')
    state, step = jax.jit(made._init)(0), jax.jit(made._step, static_argnums=(0, 1))
    kernels = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.params) if path[-1].key == 'kernel']
    masks = jax.tree.leaves(state.opt_state[1].projections)
    self.assertLen(masks, len(kernels))
    ends = []
    for decay in (0.0, 10.0):
      numbers = programs.Numbers(jnp.float32(1e-2), jnp.float32(decay), jnp.int32(0), jnp.float32(1))
      after, _ = step('sparse', None, state, text, jnp.arange(4), numbers)
      ends.append(after.params['h_0']['attn']['c_attn']['kernel'])
    # Decay moves what the mask leaves out; what it keeps takes the same step.
    moved, mask = np.abs(ends[0] - ends[1]) > 1e-7, state.opt_state[1].projections['h_0']['attn']['c_attn']['kernel']
    self.assertGreater(moved[~mask].mean(), 0.5)
    self.assertFalse(moved[mask].any())

  def test_sparse_activations_take_blocks_of_sequences(self):
    for name, block in (('neuron_level', 64), ('neuron_level_128', 128), ('neuron_level_published', 64)):
      self.made(name, block)
      recipe = contenders.CONTENDERS[name].make(0.0, contenders.MANY_STEPS)
      for width in (768, 2048):  # on kernels, whether there are records of this size or not
        (policy,) = {rule.activation for rule in recipe.rules}
        plan = plan_neurons(policy, 128 * 256, width, 4 * width, jnp.bfloat16, on=target('nvidia_h200'))
        self.assertEqual((plan.plain, plan.by_weight, plan.by_activations), (None, 'mosaic_gpu', 'mosaic_gpu'))
      with self.assertRaisesRegex(ValueError, f'--batch 32: a block of {block}:2:8 .* in {block} sequences'):
        self.made(name, 32)
    self.assertEqual(contenders.make_model('neuron_level', '124m_short', 256).config.seq_len, 256)
    self.assertEqual(contenders.make_model('dense_124m', 'wide2048_3_short', 256).config.seq_len, 256)

  def test_blocks_of_tokens_are_trained_alone(self):
    made, _ = self.made('neuron_level', 64)
    with mock.patch.object(s24, 'sparsify', wraps=s24.sparsify) as sparsify:
      for phase in ('dense', 'sparse'):
        step, arguments = made.step_of(phase, False)
        jax.eval_shape(step, *arguments)
        jax.eval_shape(lambda *given, phase=phase: made._evaluate(phase, *given), *arguments[:2], made.held_out)
    found = [
      (call.kwargs['phase'], call.args[0].config.ffn_order, {bool(rule.activation) for rule in call.args[1].rules})
      for call in sparsify.call_args_list
    ]
    self.assertEqual(found, [
      ('dense', 'sequence', {True}), ('dense', 'sequence', {False}), ('sparse', 'position', {True}),
      ('sparse', 'sequence', {False}),
    ])  # fmt: skip

  @pytest.mark.slow
  def test_a_step_with_sparse_activations_is_that_of_an_experiment(self):
    config = experiment.load_config('nano', tiny=True)
    with config.unlocked():
      config.model.mlp = 'relu2'
      config.recipe.update({'name': 'neuron_level', 'dense_from': 'projected'})
    starts = np.arange(64, dtype=np.int32)
    for name, kwargs in (
      ('neuron_level', {}),
      ('neuron_level_published', {'features': '64:2:8', 'tokens': '64:2:8', 'dense_features': 0.05}),
    ):
      made, text = self.made(name, 64)
      with config.unlocked():
        config.recipe.kwargs = {'policy': {**kwargs, 'implementation': 'reference'}}
      parts = build.make_parts(config, data=FakeData(batch_size=64))._replace(model=made.model)
      self.assertEqual([rule.path for rule in parts.recipe.rules], [rule.path for rule in made.described.rules])
      state = jax.jit(made._init)(0)
      # Scaled, so that what is left out can be told from rounding.
      state = state._replace(params=jax.tree.map(lambda p: 3 * p if p.ndim > 1 else p, state.params))
      rows = np.stack([np.asarray(text)[i : i + 17] for i in starts]).astype(np.int32)
      batch = {'inputs': rows[None, :, :-1], 'targets': rows[None, :, 1:]}
      numbers, found = programs.Numbers(jnp.float32(1e-3), jnp.float32(0.0), jnp.int32(0), jnp.float32(1)), {}
      for phase in ('dense', 'sparse'):
        _, found[phase] = jax.jit(made._step, static_argnums=(0, 1))(phase, False, state, text, starts, numbers)
        tx = build.make_optimizer(config, parts.recipe, phase)
        run = run_programs.TrainState(state.step, state.params, tx.init(state.params))
        _, wanted = jax.jit(run_programs.step_of(parts, phase))(run, batch)
        np.testing.assert_allclose(found[phase], (wanted.loss, wanted.grad_norm), rtol=2e-5, err_msg=f'{name} {phase}')
      for dense, sparse in zip(found['dense'], found['sparse'], strict=True):
        self.assertGreater(abs(float(dense - sparse)), 1e-3 * float(dense), name)

      # Activations are evaluated dense, and the dense end begins with the weights that are sparse until then.
      pruned = jax.jit(made._prune)(state)
      projected = jax.jit(build.projection(parts, state.params))(state.params, state.opt_state)
      jax.tree.map(np.testing.assert_array_equal, pruned.params, projected)
      evaluate = jax.jit(made._evaluate, static_argnums=0)
      held_out = np.stack([starts, starts + 64])
      losses = [float(evaluate(*given, text, held_out)) for given in (('sparse', state), ('dense', pruned))]
      np.testing.assert_allclose(*losses, rtol=1e-6)
      self.assertNotAlmostEqual(losses[0], float(evaluate('dense', state, text, held_out)), places=3)

  def test_a_dense_end_begins_with_the_weights_that_the_sparse_steps_computed_with(self):
    zero = np.int32(0)
    for name, kept in (('fst', 1.0), ('fst_from_pruned', 0.5)):
      made, _ = self.made(name)
      state = jax.jit(made._init)(0)
      entered = []
      made.init = lambda seed, state=state: state
      made.step = lambda phase, step, e=entered: lambda s, *_: (e.append((phase, s.params)) or s, (zero, zero))
      made.evaluate = lambda phase: lambda *_: zero
      made._made = {'prune': made._prune}
      trials.run(made, None, 2, Trial(1e-3, 1e-4), steps=12, step_ms=1.0, evaluations=1)
      self.assertEqual([phase for phase, _ in entered], ['sparse'] * 10 + ['dense'] * 2)
      for (_, params), share in ((entered[9], 1.0), (entered[10], kept), (entered[11], kept)):
        up, attention = params['h_0']['mlp']['c_fc']['kernel'], params['h_0']['attn']['c_attn']['kernel']
        self.assertEqual((np.count_nonzero(up) / up.size, np.count_nonzero(attention)), (share, attention.size), name)

  def test_mst_has_the_schedules_of_a_run_of_any_length(self):
    make = contenders.CONTENDERS['mst_half_dense'].make
    self.assertEqual(make(0.0, np.int64(400)).phases, make(0.0, 400).phases)
    with self.assertRaisesRegex(ValueError, 'is shorter than refresh_every=10'):
      make(0.0, np.int64(300))

    @jax.jit
    def traced(steps, at):
      topologies = [rule.policy.projection.update for rule in make(0.0, steps).rules]
      return [(topology.density(at), topology.drop_fraction(at)) for topology in topologies]

    for steps in (400, 1237):
      at = np.arange(1, steps + 1, dtype=np.int32)
      topologies = [rule.policy.projection.update for rule in make(0.0, steps).rules]
      wanted = [(topology.density(at), topology.drop_fraction(at)) for topology in topologies]
      np.testing.assert_allclose(traced(np.float32(steps), at), wanted, atol=1e-6)
      self.assertGreater(np.ptp(wanted[0][1]), 0.29)  # it depends on the length

  @pytest.mark.slow
  def test_mst_is_dense_then_half_dense_then_dense_again(self):
    made, text = self.made('mst_half_dense')
    made.init, steps, seen = jax.jit(made._init), {}, []

    def step(phase, at):
      steps.setdefault(phase, jax.jit(made._step, static_argnums=(0, 1)))

      def run(state, *given):
        state, out = steps[phase](phase, None, state, text, *given[1:])
        kernels = [w for path, w in jax.tree_util.tree_leaves_with_path(state.params) if path[-1].key == 'kernel']
        links = jax.tree.leaves(state.opt_state.projections)
        seen.append((phase, *(list(map(np.asarray, each)) for each in (kernels, links))))
        return state, out

      return run

    made.step, made.evaluate = step, lambda phase: lambda *_: np.float32(0)
    trials.run(made, None, 2, Trial(1e-2, 0.0), steps=400, step_ms=1.0, evaluations=1)
    self.assertEqual([phase for phase, *_ in seen], ['dense'] * 10 + ['sparse'] * 370 + ['dense'] * 20)
    for phase, kernels, links in seen:
      for w, mask in zip(kernels, links, strict=True):
        self.assertTrue(w.all() if phase == 'dense' else not w[~mask].any())
    shapes = {str(i): mask.shape for i, mask in enumerate(seen[0][-1])}
    topology = made.described.rules[0].policy.projection.update
    wanted = [float(share) for share in topology.densities(jnp.int32(50), shapes).values()]
    self.assertBetween(np.mean(wanted), 0.4, 0.5)
    ultra = [links for _, _, links in seen[20:380]]
    for links in ultra:
      np.testing.assert_allclose([mask.mean() for mask in links], wanted, atol=1e-3)
      for mask in links:
        fours = [mask.reshape(-1, 4, mask.shape[1]).sum(1), mask.reshape(len(mask), -1, 4).sum(2)]
        self.assertLessEqual(max(map(np.max, fours)), 2)
    moved = [any((a != b).any() for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(ultra)]
    self.assertEqual({at % 10 for at in np.flatnonzero(moved)}, {8})  # in every tenth step

  def test_a_run_too_short_for_mst_is_refused(self):
    made, _ = self.made('mst_half_dense')
    with self.assertRaisesRegex(ValueError, 'a stage of 300 steps x 0.025 is shorter than refresh_every=10'):
      trials.run(made, None, 2, Trial(1e-3, 0.0), steps=300, step_ms=1.0, evaluations=1)

  @pytest.mark.slow
  def test_two_programs_train_what_one_does(self):
    made, text = self.made('fst')
    made.lower()
    made.compile()
    alone = jax.jit(made._step, static_argnums=(0, 1))
    numbers = programs.Numbers(jnp.float32(1e-2), jnp.float32(6e-4), jnp.int32(0), jnp.float32(1))
    first = made.init(np.int32(0))
    searched, ends = [jax.tree.leaves(jax.device_get(first.opt_state[1].projections))], []
    for step_at in (lambda i: made.step('sparse', i), lambda i: lambda *x: alone('sparse', None, *x)):
      state = made.init(np.int32(0))
      for i in range(contenders.SEARCH_EVERY + 1):
        state, _ = step_at(i)(state, text, np.arange(4, dtype=np.int32) + 7 * i, numbers)
      ends.append(jax.device_get(state))
      searched.append(jax.tree.leaves(ends[-1].opt_state[1].projections))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), ends[0].params, ends[1].params)
    before, *after = ([m.tobytes() for m in masks] for masks in searched)
    self.assertEqual(*after)
    self.assertNotEqual(before, after[0])  # the step of the search has chosen others


if __name__ == '__main__':
  absltest.main()
