"""The steps of a plan are what the op runs: in its order, on its back ends, of its sizes and layouts.

And its bytes are those that are packed and kept.
"""

import contextlib
import dataclasses
import functools
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
from sparse24_jax.availability import target
from sparse24_jax.block_gain import explain
from sparse24_jax.block_plan import plan_block
from sparse24_jax.linear_layer import pack_weight
from sparse24_jax.packing import E4M3
from sparse24_jax.steps import Matmul

TOKENS, D, HIDDEN = 64, 128, 192
FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue', implementation='dense')
FST_FP8 = dataclasses.replace(FST, precision='fp8')
S_STE = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', implementation='dense')
FP8 = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8', implementation='dense')
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
  """Bytes of all arrays, but for keys and scales."""
  arrays = (a for a in jax.tree.leaves(trees) if isinstance(a, jax.Array) and a.size > 2)
  return sum(a.size * a.dtype.itemsize for a in arrays)


def kernel(a, b, *, implementation, b_layout, out_layout, **_):
  """A call of `sparse_matmul`, but for the dtype of its result."""
  m, k = a.shape
  key = dict(m=m, n=b.size // k, k=k, dtype=a.values.dtype.name, b_layout=b_layout, out_layout=out_layout)
  return implementation, key


def dense(x, w, *_, **__):
  """A call of `fp8_dot`; records tell dense matmuls apart by their sizes."""
  return None, dict(m=w.shape[0], n=x.shape[0], k=x.shape[1])


MATMULS = {(sparse_matmul, 'sparse_matmul'): kernel, (quantize, 'fp8_dot'): dense}


@contextlib.contextmanager
def recorded(ran):
  """Notes what runs, in order; on one device, since what a mesh may divide is traced more than once.

  Of a pass the bytes that it moves, those of its operands and results, and the back ends that it may take; of a matmul
  its back end and problem.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(mock.patch.object(_device, 'arrays_are_whole', lambda: True))
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


def planned(steps, passes):
  """What the steps of a plan are, as `recorded` notes it; XLA's own passes are not seen."""
  found = []
  for step in steps:
    if isinstance(step, Matmul):
      key = dict(step.timings[0].key)
      names = ('m', 'n', 'k', 'dtype', 'b_layout', 'out_layout') if step.backend else ('m', 'n', 'k')
      found.append((step.backend, {name: key[name] for name in names}))
      continue
    for op, moved in step.moves:
      if op != costs.COPY:
        name = op.removesuffix('_axis-1').removesuffix('_axis-2')
        name = max(filter(name.endswith, (*PASSES.values(), *PASSES8.values())), key=len)
        found.append((name, moved, None if name in OF_XLA else passes))
  return found


def sides(gated):
  return {'up': (D, HIDDEN), 'down': (HIDDEN, D)} | ({'gate': (D, HIDDEN)} if gated else {})


class StepsTest(parameterized.TestCase):

  def _traced(self, policy, gated):
    """What `ffn` runs, forward and backward; what is packed; what is kept between the two."""
    weights = {role: jax.ShapeDtypeStruct(side, jnp.bfloat16) for role, side in sides(gated).items()}
    state = {role: jax.eval_shape(policy.projection.init, w) for role, w in weights.items()}
    x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16)

    def step(x, weights, state, packed):
      f = functools.partial(s24.ffn, policy=policy, activation='silu' if gated else 'gelu', key=jax.random.key(0))
      y, vjp = jax.vjp(lambda x, w: f(x, w['up'], w['down'], packed, w_gate=w.get('gate')), x, weights)
      return vjp(y), jax.tree.leaves(vjp)

    packed = {
      role: jax.eval_shape(functools.partial(pack_weight, policy, dtype=jnp.bfloat16), w, state[role])
      for role, w in weights.items()
    }
    ran = []
    with recorded(ran):
      _, kept = jax.eval_shape(step, x, weights, state, packed)
    return ran, packed, kept

  @parameterized.product(policy=(FST, FP8, FST_FP8), gated=(False, True))
  def test_are_what_runs(self, policy, gated):
    plan = plan_block(policy, TOKENS, sides(gated), jnp.bfloat16)
    self.assertTrue(plan.fused)
    ran, packed, kept = self._traced(policy, gated)
    self.assertEqual(ran, planned(plan.steps, plan.precision.pass_backends))
    operands = [dataclasses.replace(each, state=None) for each in packed.values()]
    self.assertEqual(sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(operands)), plan.packed_bytes)
    in_8_bits = sum(a.size for a in kept if a.dtype == E4M3 and TOKENS in a.shape)
    self.assertEqual(in_8_bits, plan.saved_bytes)  # at a byte an entry, in place of two

  @parameterized.parameters(False, True)
  def test_not_fused_they_are_those_of_the_layers(self, gated):
    plan = plan_block(S_STE, TOKENS, sides(gated), jnp.bfloat16)
    self.assertFalse(plan.fused)
    found = planned(plan.steps, plan.precision.pass_backends)
    of_kernels = [step for step in found if step[0] is not None]  # XLA's matmuls are not seen
    self.assertLen(of_kernels, 9 if gated else 6)
    self.assertCountEqual(self._traced(S_STE, gated)[0], of_kernels)
    matmuls = [(step.name, step.backend is None) for step in plan.steps if isinstance(step, Matmul)]
    roles = (('forward', False), ('input_grad', True), ('weight_grad', False))  # the second is XLA's
    layers = ('up', 'down', 'gate') if gated else ('up', 'down')
    self.assertEqual(matmuls, [(f'{role} of {layer}', dense) for layer in layers for role, dense in roles])

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
