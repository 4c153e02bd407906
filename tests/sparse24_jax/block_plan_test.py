"""The steps of a plan are what `dot`, `ffn` and `neuron_level_ffn` run: in their order, on their back ends.

Of their sizes and layouts, too; and their bytes are those that are packed and kept.
"""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _device, costs
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.pack import api as pack
from pallas_kernels.quantize import api as quantize
from pallas_kernels.sparse_matmul import api as sparse_matmul
import sparse24_jax as s24
from sparse24_jax import _activation_kernels, linear_layer, precision
from sparse24_jax.availability import target
from sparse24_jax.block_gain import explain
from sparse24_jax.block_plan import plan_block
from sparse24_jax.ffn import ffn_at
from sparse24_jax.neuron_plan import plan_neurons
from sparse24_jax.packing import E4M3
from sparse24_jax.plan import plan_layer
from sparse24_jax.steps import Matmul
from tests.sparse24_jax import layers_alike

TOKENS, D, HIDDEN = 320, 128, 192
FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue', implementation='dense')
FST_FP8 = dataclasses.replace(FST, precision='fp8')
S_STE = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', implementation='dense')
FP8 = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8', implementation='dense')
# One matmul on a kernel; none, and a sample that XLA draws.
MIXED = dataclasses.replace(S_STE, weight_grad='dense')
SAMPLED = s24.DotPolicy(weight_grad='mvue', implementation='dense')
EXACT_FP8 = dataclasses.replace(FP8, weight_grad='dense')
H100 = 'nvidia_h100_80gb_hbm3'
# Functions that move memory -> how records call what they do, up to its end.
PASSES = {
  (quantize, 'amax'): 'amax', (quantize, 'quantize'): 'quantize_both', (pack, 'mvue_pack'): 'mvue_pack',
  (activations, 'gated_activation'): 'gated_silu', (activations, 'activation_backward_amax'): 'backward_amax',
  (activations, 'activation_backward_pack'): 'backward_pack',
}  # fmt: skip
# Those that are XLA's own; the plan has back ends for the others.
OF_XLA = ('amax', 'gated_silu', 'backward_amax')
# And those that write float8 if they are told a dtype.
PASSES8 = {'mvue_pack': 'mvue_pack8', 'backward_pack': 'backward_pack8'}


def size(*trees):
  """Bytes of all arrays, but for keys, scales and the maxima that these are made of."""
  arrays = (a for a in jax.tree.leaves(trees) if isinstance(a, jax.Array) and a.ndim > 1)
  return sum(a.size * a.dtype.itemsize for a in arrays)


def size_of(arrays):
  """Bytes of arrays of which shapes and dtypes are known."""
  return sum(a.size * a.dtype.itemsize for a in arrays)


def kernel(a, b, *, implementation, b_layout, out_layout, **_):
  """A call of `sparse_matmul`, but for the dtype of its result."""
  m, k = a.shape
  key = dict(m=m, n=b.size // k, k=k, dtype=a.values.dtype.name, b_layout=b_layout, out_layout=out_layout)
  return implementation, key


def dense(x, w, *_, **__):
  """A call of `fp8_dot`; records tell dense matmuls apart by their sizes."""
  return None, dict(m=w.shape[0], n=x.shape[0], k=x.shape[1])


def plain(a, b, *_, **__):
  """A matmul that is left to XLA."""
  return None, dict(m=b.shape[1], n=a.size // a.shape[-1], k=a.shape[-1])


MATMULS = {
  (sparse_matmul, 'sparse_matmul'): kernel, (quantize, 'fp8_dot'): dense, (linear_layer, 'matmul'): plain,
  (precision, 'matmul'): plain,
}  # fmt: skip


@contextlib.contextmanager
def recorded(ran):
  """Notes what runs, in order; on one device, since what a mesh may divide is traced more than once.

  Of a pass the bytes that it moves, those of its operands and results, and the back ends that it may take; of a matmul
  its back end and problem.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(_device, 'arrays_are_whole', lambda: True))
    stack.enter_context(layers_alike.traced_one_by_one())
    depth = []
    for (module, name), what in (PASSES | MATMULS).items():

      def spy(plain, what, *args, **kwargs):
        depth.append(what)
        try:
          out = plain(*args, **kwargs)
        finally:
          depth.pop()
        if not depth:  # not what one of them calls itself
          name = what if kwargs.get('dtype') is None else PASSES8.get(what, what)
          made = (name, size(args, kwargs, out), kwargs.get('implementation')) if isinstance(what, str) else None
          ran.append(made or what(*args, **kwargs))
        return out

      counted = functools.partial(spy, getattr(module, name), what)
      stack.enter_context(mock.patch.object(module, name, counted))
    yield


def noting(ran, name, f):
  """`f`, of which each call notes the name."""

  def noted(*args, **kwargs):
    ran.append(name)
    return f(*args, **kwargs)

  return noted


def planned(steps, passes):
  """What the steps of a plan are, as `recorded` notes it; XLA's own passes are not seen."""
  found = []
  for step in steps:
    if isinstance(step, Matmul):
      key = dict(step.timings[0].key)
      names = ('m', 'n', 'k', 'dtype', 'b_layout', 'out_layout') if step.backend else ('m', 'n', 'k')
      found.append((step.backend, {name: key[name] for name in names}))
      continue
    for op, moved in step.moves or ():
      if op != costs.COPY:
        name = op.removesuffix('_axis-1').removesuffix('_axis-2')
        name = max(filter(name.endswith, (*PASSES.values(), *PASSES8.values())), key=len)
        found.append((name, moved, None if name in OF_XLA else passes))
  return found


def sides(gated):
  return {'up': (D, HIDDEN), 'down': (HIDDEN, D)} | ({'gate': (D, HIDDEN)} if gated else {})


class StepsTest(parameterized.TestCase):

  def _traced(self, policy, gated, down=None):
    """What `ffn` runs, forward and backward; what is packed; what is kept between the two."""
    weights = {role: jax.ShapeDtypeStruct(side, jnp.bfloat16) for role, side in sides(gated).items()}
    state = {role: jax.eval_shape(policy.projection.init, w) for role, w in weights.items()}
    x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16)

    def step(x, weights, state, packed):
      f = functools.partial(
        ffn_at, policy=policy, down=down, activation='silu' if gated else 'gelu', key=jax.random.key(0), precision=None,
        hidden_sharding=None,
      )  # fmt: skip
      y, vjp = jax.vjp(lambda x, w: f(x, w, {}, packed), x, weights)
      return vjp(y), jax.tree.leaves(vjp)

    packed = {
      role: jax.eval_shape(functools.partial(linear_layer.pack_weight, policy, dtype=jnp.bfloat16), w, state[role])
      for role, w in weights.items()
    }
    ran = []
    with recorded(ran):
      _, kept = jax.eval_shape(step, x, weights, state, packed)
    return ran, packed, kept

  @parameterized.parameters(
    *itertools.product((FST, FP8, FST_FP8), (False, True), ('mvue',)), (FST, False, 'dense'), (FP8, True, 'dense'),
  )
  def test_are_what_runs(self, policy, gated, last):
    down = dataclasses.replace(policy, weight_grad=last)
    plan = plan_block(policy, TOKENS, sides(gated), jnp.bfloat16, down=down)
    self.assertTrue(plan.fused)
    ran, packed, kept = self._traced(policy, gated, down)
    self.assertEqual(ran, planned(plan.steps, plan.precision.pass_backends))
    operands = [dataclasses.replace(each, state=None) for each in packed.values()]
    self.assertEqual(size_of(jax.tree.leaves(operands)), plan.packed_bytes)
    in_8_bits = sum(a.size for a in kept if a.dtype == E4M3 and TOKENS in a.shape)
    self.assertEqual(in_8_bits, plan.saved_bytes)  # at a byte an entry, in place of two
    x = 0 if plan.precision.scales else TOKENS * D * 2  # which no step makes
    self.assertEqual(size_of(a for a in kept if TOKENS in a.shape), sum(s.kept for s in plan.steps) + x)

  def test_a_dense_forward_notes_nothing(self):
    plan = plan_block(FP8, TOKENS, sides(False), jnp.bfloat16)
    dense = dataclasses.replace(plan, up=dataclasses.replace(
      plan.up, backends=dataclasses.replace(plan.up.backends, forward=None)
    ))  # fmt: skip
    passes = [
      [move.op for move in step.moves] for each in (plan, dense) for step in each.steps if step.name == 'h rounded'
    ]  # fmt: skip
    self.assertEqual(passes, [['quantize_both'], ['amax', 'quantize_both']])

  @parameterized.product(policy=(S_STE, MIXED), gated=(False, True))
  def test_not_fused_are_what_runs(self, policy, gated):
    plan = plan_block(policy, TOKENS, sides(gated), jnp.bfloat16)
    self.assertFalse(plan.fused)
    found = planned(plan.steps, plan.precision.pass_backends)
    self.assertEqual(self._traced(policy, gated)[0], found)
    on = {'forward': True, 'weight_grad': policy is S_STE, 'input_grad': False}
    forward, *backward = on
    hidden = ('gate', 'up') if gated else ('up',)
    ends = [(f'{forward} of {name}', on[forward]) for name in (*hidden, 'down')]
    ends += [(f'{role} of {name}', on[role]) for name in ('down', *reversed(hidden)) for role in backward]
    self.assertEqual([(s.name, s.backend is not None) for s in plan.steps if isinstance(s, Matmul)], ends)

  @parameterized.parameters(FST, S_STE, MIXED, SAMPLED, FP8, FST_FP8, EXACT_FP8)
  def test_of_a_layer_are_what_dot_runs(self, policy):
    plan = plan_layer(policy, TOKENS, D, HIDDEN, jnp.bfloat16)
    x, w = (jax.ShapeDtypeStruct(side, jnp.bfloat16) for side in ((TOKENS, D), (D, HIDDEN)))
    state = policy.projection and jax.eval_shape(policy.projection.init, w)
    packed = None
    if plan.packs:
      packed = jax.eval_shape(functools.partial(linear_layer.pack_weight, policy, dtype=jnp.bfloat16), w, state)

    def step(x, w, state):
      z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=policy, key=jax.random.key(0)), x, w)
      return vjp(z), jax.tree.leaves(vjp)

    ran = []
    with recorded(ran):
      _, kept = jax.eval_shape(step, x, w, state if packed is None else packed)
    self.assertEqual(ran, planned(plan.steps, plan.precision.pass_backends))
    in_8_bits = sum(a.size for a in kept if a.dtype == E4M3 and TOKENS in a.shape)
    self.assertEqual(in_8_bits, sum(step.kept for step in plan.steps))

  @parameterized.parameters(s24.TwoOfFour(), s24.VNM(64, 8))
  def test_of_a_squared_relu_block_are_what_runs(self, tokens):
    """Each step by what it makes: the name of the function that makes it, in order."""
    policy = s24.ActivationPolicy(s24.VNM(64, 8), tokens, dense_features=0.05, implementation='sparse')
    plan = plan_neurons(policy, 256, D, 1024, jnp.bfloat16)
    x, w_up, w_down = (jax.ShapeDtypeStruct(side, jnp.bfloat16) for side in ((256, D), (D, 1024), (1024, D)))
    scale = jax.ShapeDtypeStruct((), jnp.float32)

    def step(x, w_up, w_down, state):
      block = functools.partial(s24.neuron_level_ffn, policy=policy)
      z, vjp = jax.vjp(lambda *given: block(*given, state), x, w_up, w_down)
      return vjp(z), jax.tree.leaves(vjp)

    two = isinstance(tokens, s24.TwoOfFour)
    transposed, by_tokens = ('transpose_pack_24', 'sparse_matmul') if two else ('transpose_pack', 'vnm_matmul')
    made_by = {
      'w_up packed': 'soft_threshold_pack', 'w_down packed': 'soft_threshold_pack', 'h': 'sparse_matmul',
      'dy': 'sparse_matmul', 'z': 'vnm_matmul', 'dx': 'vnm_matmul', 'y packed': 'vnm_pack', 'dh packed': 'vnm_pack',
      'w_down expanded': 'expand', 'w_up expanded': 'expand', 'y transposed': transposed, 'dh transposed': transposed,
      'dW of down': by_tokens, 'dW of up': by_tokens, 'columns for dW of down': 'take_columns',
      'columns for dW of up': 'take_columns',
    }  # fmt: skip
    ran = []
    with contextlib.ExitStack() as stack:
      for name in set(made_by.values()):
        noted = noting(ran, name, getattr(_activation_kernels, name))
        stack.enter_context(mock.patch.object(_activation_kernels, name, noted))
      _, kept = jax.eval_shape(step, x, w_up, w_down, {'up': scale, 'down': scale})
    # The others are XLA's: the matmul of the dense neurons, and the transposition of a gradient.
    self.assertEqual(ran, [made_by[each.name] for each in plan.steps if each.name in made_by])
    self.assertLen(plan.steps, len(ran) + 3)
    values = [a for a in kept if a.dtype == jnp.bfloat16 and a.shape == (256, 2 * 1024 // 8)]
    self.assertEqual(size_of(values), sum(each.kept for each in plan.steps))

  def test_a_plan_for_another_gpu_is_a_value(self):
    plan = plan_block(s24.DotPolicy(s24.transposable()), 16384, {'up': (4096, 16384), 'down': (16384, 4096)},
                      jnp.bfloat16, on=target(H100))  # fmt: skip
    again = plan_block(s24.DotPolicy(s24.transposable()), 16384, {'up': (4096, 16384), 'down': (16384, 4096)},
                       jnp.bfloat16, on=target(H100))  # fmt: skip
    self.assertEqual((plan, hash(plan)), (again, hash(again)))
    self.assertEqual(plan.up.backends.forward, 'mosaic_gpu')

  def test_explained(self):
    recipe = s24.recipes.s_ste('.*', fp8=True)
    lines = explain(s24.block_gain(4096, 16384, recipe, tokens=16384, device=H100)).split('\n')
    plan = plan_block(recipe.rules[0].policy, 16384, {'up': (4096, 16384), 'down': (16384, 4096)}, jnp.bfloat16,
                      on=target(H100))  # fmt: skip
    chosen = lines[2 : 2 + len(plan.steps)]  # below the title and the packing of weights
    for step, line in zip(plan.steps, chosen, strict=True):
      self.assertStartsWith(line.strip(), step.name)
      self.assertEqual('mosaic_gpu' in line, isinstance(step, Matmul) and step.backend == 'mosaic_gpu')


if __name__ == '__main__':
  absltest.main()
