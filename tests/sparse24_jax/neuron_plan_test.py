"""When the squared-ReLU block takes its kernels by itself, and what it expects of them: records are injected."""

import contextlib
import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _records, costs
from pallas_kernels.ffi import cusparselt
import sparse24_jax as s24
from sparse24_jax import neuron_plan as gain
from sparse24_jax import steps
from sparse24_jax.availability import target
from tests import targets
from tests.sparse24_jax.gpus import gpu, H100

T, D, H = 512, 64, 1024
BLOCKS = s24.VNM(128, 8)
POLICY = s24.ActivationPolicy(BLOCKS, BLOCKS, dense_features=0.05)
TWO_OF_FOUR = s24.ActivationPolicy(BLOCKS)  # the default
HEADLINE = (16384, 4096, 16384)
# Milliseconds of each matmul: by a weight, by activations, by their transposes, and by two of four tokens of these.
WINS = (
  dict(dense=4.0, mosaic_gpu=3.0), dict(dense=5.0, mosaic_gpu=1.0), dict(dense=6.0, mosaic_gpu=2.0),
  dict(dense=7.0, mosaic_gpu=4.0),
)  # fmt: skip
NOTHING = ({}, {}, {}, {})


@contextlib.contextmanager
def records(times=WINS, *, pass_ms=lambda op, size: 0.0):
  """These times of matmuls, asked for with the keys of `POLICY` and then of two of four tokens, and of passes."""
  pair = dict(pattern='128:2:8', dtype='bfloat16', out_dtype='bfloat16', out_layout='mn')
  keys = (
    dict(m=H, n=T, k=D, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='nm'),
    dict(m=T, n=D, k=H) | pair,
    dict(m=H, n=D, k=T) | pair,
    dict(m=H, n=D, k=T, dtype='bfloat16', out_dtype='bfloat16', b_layout='kn', out_layout='nm'),
  )

  def matmul(device, op, key):
    assert device == H100.slug
    (i,) = (i for i, known in enumerate(keys) if key == known)
    assert op == ('vnm_matmul' if i in (1, 2) else 'sparse_matmul')
    return dict(times[i])

  fastest = min(times[0], key=times[0].get, default='dense')
  with (
    mock.patch.object(gain.sparse_matmul, 'candidates_for', lambda **_: (fastest, 'dense')),
    mock.patch.object(_records, 'expected_ms', matmul),
    mock.patch.object(costs, 'expected_ms', lambda device, op, size: pass_ms(op, size)),
  ):
    yield


def why_dense(policy=POLICY, tokens=T, d=D, hidden=H, dtype=jnp.bfloat16):
  return gain.plan_neurons(policy, tokens, d, hidden, dtype).plain


class ExpectedTest(parameterized.TestCase):

  def _expected(self, policy=POLICY):
    plan = gain.NeuronLevelPlan(policy, T, D, H, 'bfloat16', 'mosaic_gpu', 'mosaic_gpu')
    return gain.expected(plan, H100.slug)

  def test_matmuls(self):
    with records():
      found = self._expected(dataclasses.replace(POLICY, dense_features=0))
    # H and dY, Z and dX, dW1 and dW2.
    self.assertEqual((found.expected_ms, found.dense_ms), (2 * (3 + 1 + 2), 2 * (4 + 5 + 6)))
    self.assertEqual(found.gain, 2.5)

  def test_dense_neurons_have_a_share_of_the_weight_gradients(self):
    with records():
      self.assertEqual(self._expected(dataclasses.replace(POLICY, dense_features=0.5)).expected_ms, 12 + 6)

  def test_matmuls_with_two_of_four_tokens(self):
    with records():
      found = self._expected(TWO_OF_FOUR)
      some = self._expected(dataclasses.replace(TWO_OF_FOUR, dense_features=0.5))
    self.assertEqual((found.expected_ms, found.dense_ms), (2 * (3 + 1 + 4), 2 * (4 + 5 + 7)))
    self.assertEqual(some.expected_ms, 16 + 7)

  def test_two_of_four_tokens_turn_into_half_of_the_entries_and_their_places(self):
    moved = []
    for policy in (dataclasses.replace(POLICY, dense_features=0.0), TWO_OF_FOUR):
      seen = []
      with records(pass_ms=lambda op, size, seen=seen: seen.append((op, size)) or 0.0):
        self._expected(policy)
      moved.append(dict(seen[:-1])[costs.COPY])
    self.assertEqual(moved[1] - moved[0], 2 * T * H * (1 + 1 / 8 - 0.5))

  def test_bytes_of_the_passes(self):
    seen = []
    with records(pass_ms=lambda op, size: seen.append((op, size)) or 0.0):
      self._expected(dataclasses.replace(POLICY, dense_features=0.25))
    sizes = dict(seen[:-1])
    # A weight of 2 bytes an entry is read, an operand of 1 1/8 written.
    pack = round(D * H * 3.125)
    self.assertEqual(sizes['soft_threshold_pack_axis-1'], pack)
    self.assertEqual(sizes['soft_threshold_pack_axis-2'], pack)
    # In units of h: read 1, 1/4 written twice; the same for dy, with 1/4 read; 1/4 transposed twice; columns of a
    # quarter of the neurons, twice; and both weights expanded, dW1 transposed.
    moved = round(T * H * 2 * (1.5 + 1.5 + 1 + 2 * (0.25 + 0.25)) + 2 * pack + 4 * D * H)
    self.assertEqual(sizes[costs.COPY], moved)
    self.assertEqual(seen[-1], (costs.COPY, 5 * T * H * 2))

  @parameterized.parameters((POLICY, 0), (POLICY, 1), (POLICY, 2), (TWO_OF_FOUR, 3))
  def test_a_matmul_that_was_not_measured(self, policy, i):
    times = [*WINS]
    times[i] = {}
    with records(times):
      self.assertIsNone(self._expected(policy))

  @parameterized.parameters((POLICY, 1), (POLICY, 2), (TWO_OF_FOUR, 3))
  def test_a_matmul_that_loses(self, policy, i):
    times = [*WINS]
    times[i] = dict(dense=1.0, mosaic_gpu=1.0)
    with records(times):
      self.assertIsNone(self._expected(policy))

  def test_a_pass_that_was_not_measured(self):
    with records(pass_ms=lambda op, size: None if op == 'soft_threshold_pack_axis-1' else 0.0):
      self.assertIsNone(self._expected())

  def test_near_what_the_headline_block_took(self):
    plan = gain.plan_neurons(POLICY, *HEADLINE, jnp.bfloat16, on=target(H100.slug))
    found = gain.expected(plan, H100.slug)
    self.assertBetween(found.expected_ms, 0.9 * 9.84, 1.05 * 9.84)
    self.assertBetween(found.gain, 0.85 * 1.975, 1.05 * 1.975)


class WhyDenseTest(parameterized.TestCase):

  def test_kernels_where_they_pay(self):
    with gpu(), records():
      self.assertIsNone(why_dense())
    with gpu():
      for policy in (POLICY, TWO_OF_FOUR, s24.ActivationPolicy()):
        self.assertIsNone(gain.plan_neurons(policy, *HEADLINE, jnp.bfloat16).plain)

  @parameterized.parameters(
    (dict(device=targets.target_device('sm_80')), 'no kernel for V:N:M'),
    (dict(whole=False), 'divided by a mesh'),
    (dict(triton='no such module'), r'sparse24-jax\[cuda\]: no such module'),
  )
  def test_machines(self, machine, message):
    with gpu(**machine), records():
      self.assertRegex(why_dense(), message)

  def test_inside_a_shard_map_arrays_are_whole_and_there_is_a_mesh(self):
    found = []

    @jax.shard_map(mesh=jax.make_mesh((2,), ('data',)), in_specs=(), out_specs=jax.P())
    def f():
      found.append(why_dense())
      return jnp.zeros(())

    with gpu(), records():
      jax.eval_shape(f)
    self.assertRegex(found[0], 'divided by a mesh')

  @parameterized.parameters(
    (dict(features=s24.TwoOfFour()), '2:4 activations have no kernels'),
    (dict(tokens=BLOCKS, clusters=s24.Clusters(4)), r'Clusters\(number=4.* have no kernels'),
    (dict(sparse_weights=False), 'dense weights it was not timed'),
  )
  def test_policies(self, change, message):
    with gpu(), records():
      self.assertRegex(why_dense(dataclasses.replace(TWO_OF_FOUR, **change)), message)

  @parameterized.parameters(
    (dict(tokens=T + 64), '576 tokens are no multiple of V = 128 and 16 M = 128'),
    (dict(hidden=H + 64), '1088 neurons are no multiple'),
    (dict(policy=s24.ActivationPolicy(s24.VNM(128, 16)), tokens=128), '128 tokens .* V = 128 and 16 M = 256'),
    (dict(d=D + 32), 'width of 96'), (dict(tokens=2**21), 'are 2.31 or more'),
  )
  def test_sizes(self, change, message):
    with gpu(), records():
      self.assertRegex(why_dense(**change), message)

  def test_what_was_not_measured(self):
    with gpu(), records(NOTHING):
      self.assertRegex(why_dense(), 'no matmuls of bfloat16 near these')
    with gpu():
      self.assertRegex(why_dense(tokens=256, hidden=256), 'no matmuls of bfloat16 near these')
      self.assertRegex(gain.plan_neurons(POLICY, *HEADLINE, jnp.float32).plain, 'no matmuls of float32')

  def test_passes_take_what_matmuls_gain(self):
    with gpu():
      # 30 ms dense and 12.6 with the kernels, and what takes a pass of the rest.
      for ms, message in ((4.0, None), (5.0, r'27\.600 ms are expected of the kernels and 30\.000 of dense')):
        with records(pass_ms=lambda op, size, ms=ms: 0.0 if size == 10 * T * H else ms):
          found = why_dense()
        self.assertRegex(found, message) if message else self.assertIsNone(found)


class PlanTest(absltest.TestCase):

  def test_the_matmuls_by_a_weight_take_the_fastest_back_end_that_is_there(self):
    times = (WINS[0] | dict(cusparselt=2.0), *WINS[1:])
    absent = NotImplementedError('absent')
    for fastest, library, found in (
      (('cusparselt', 'dense'), None, 'cusparselt'), (('cusparselt', 'dense'), absent, 'mosaic_gpu'),
      (('dense',), None, 'mosaic_gpu'),
    ):  # fmt: skip
      with (
        gpu(), records(times), mock.patch.object(gain.sparse_matmul, 'candidates_for', return_value=fastest),
        mock.patch.object(cusparselt, 'register', side_effect=library),
      ):  # fmt: skip
        plan = gain.plan_neurons(POLICY, T, D, H, jnp.bfloat16)
      self.assertEqual({step.name: step.backend for step in plan.steps if step.name in ('h', 'dy', 'z')},
                       dict(h=found, dy=found, z='mosaic_gpu'))  # fmt: skip

  def test_dense_weights_are_neither_packed_nor_expanded(self):
    policy = dataclasses.replace(POLICY, sparse_weights=False, implementation='sparse')
    with gpu():
      plan = gain.plan_neurons(policy, T, D, H, jnp.bfloat16)
    by_weight = [step for step in plan.steps if step.name in ('h', 'dy')]
    self.assertEqual([(step.backend, step.timings[0].row) for step in by_weight], [(None, 'dense')] * 2)
    self.assertFalse([step.name for step in plan.steps if step.name.startswith('w_')])
    self.assertEqual(plan.packed_bytes, 0)

  def test_one_function_for_the_plan_that_runs_and_the_one_that_is_priced(self):
    for sizes in (HEADLINE, (256, 128, 512)):
      with gpu():
        runs = gain.plan_neurons(POLICY, *sizes, jnp.bfloat16)
      self.assertEqual(runs, gain.plan_neurons(POLICY, *sizes, jnp.bfloat16, on=target(H100.slug)))
    self.assertEqual((runs.steps, runs.packed_bytes), (runs.dense_steps, 0))

  def _takes(self, policy=POLICY, tokens=T):
    return gain.plan_neurons(policy, tokens, D, H, jnp.bfloat16).plain is None

  def test_follows_the_records_and_says_so_once(self):
    with gpu(), self.assertLogs('sparse24_jax', 'INFO') as logs:
      for times, taken in ((WINS, True), (NOTHING, False)):
        with records(times):
          self.assertEqual([self._takes(), self._takes()], [taken] * 2)
    self.assertLen(logs.output, 2)
    self.assertIn('512 tokens, 64 x 1024, takes sparse matmuls', logs.output[0])
    self.assertIn('takes dense matmuls: no matmuls of bfloat16 near these', logs.output[1])

  def test_a_name_is_followed(self):
    with gpu(), records():
      self.assertFalse(self._takes(dataclasses.replace(POLICY, implementation='reference')))
    named = dataclasses.replace(POLICY, implementation='sparse')
    with gpu(), records(NOTHING):
      plan = gain.plan_neurons(named, T, D, H, jnp.bfloat16)
    self.assertEqual({step.backend for step in plan.steps if isinstance(step, steps.Matmul)}, {'mosaic_gpu', None})
    self.assertIsNone(gain.plan_neurons(named, T, D, H, jnp.bfloat16).by_activations)  # a CPU has the references

  def test_not_without_a_gpu_nor_without_tokens(self):
    with records():
      self.assertFalse(self._takes())
      with gpu():
        self.assertFalse(self._takes(tokens=0))


if __name__ == '__main__':
  absltest.main()
