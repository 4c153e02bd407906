"""The squared-ReLU block with V:N:M activations, lowered for an H100 without one: where kernels pay it is made of them.

Runs where the CUDA plug-in wheels are, in the kernels' environment.
"""

import dataclasses
import functools
import re
from unittest import mock
import zlib

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.vnm import api
import sparse24_jax as s24
from sparse24_jax import neuron_plan as gain
from sparse24_jax.block_gain import BlockGain, Part
from sparse24_jax.steps import Pass
from tests.sparse24_jax import hopper
from tests.sparse24_jax.hlo import SPARSE, TRITON

TOKENS, D, HIDDEN = 256, 128, 512
BLOCKS = s24.VNM(128, 8)
POLICY = s24.ActivationPolicy(BLOCKS, BLOCKS, dense_features=0.05)

PAYS = BlockGain((Part('all', 1.0),), (Part('all', 2.0),), (), 0, 0)
SIDES = (TOKENS, D), (D, HIDDEN), (HIDDEN, D), (TOKENS, D)
# Passes that are kernels, to V:2:M; the others are XLA's.
KERNELS = {
  'w_up packed': 'soft_threshold_kernel', 'w_down packed': 'soft_threshold_kernel', 'w_up expanded': 'expand_rows',
  'w_down expanded': 'expand_rows', 'y packed': 'pack_rows', 'dh packed': 'pack_rows_as',
  'y transposed': 'transpose_pack', 'dh transposed': 'transpose_pack_as', 'columns for dW of up': 'take_columns',
  'columns for dW of down': 'take_columns',
}  # fmt: skip


def step(x, w_up, w_down, dz, state, policy=POLICY):
  z, vjp = jax.vjp(lambda *args: s24.neuron_level_ffn(*args, state, policy=policy), x, w_up, w_down)
  return z, vjp(dz)


def lowered(f, *args) -> str:
  args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=hopper.sharding()), args)
  with hopper.hopper():
    return inlined(jax.jit(f).lower(*args).as_text())


def inlined(text: str) -> str:
  """A program with its functions in place of their calls: a kernel is lowered once, and called as often as it runs."""
  bodies = dict(re.findall(r'^  func\.func \w+ @([\w.]+)\(.*?\n(.*?)^  }$', text, re.M | re.S))

  def body(name: str) -> str:
    return re.sub(r'^.*\bcall @([\w.]+)\(.*$', lambda call: body(call[1]), bodies[name], flags=re.M)

  return body('main')


def kernels(text: str) -> list[str]:
  """Custom calls in order: names of Triton kernels, which their configuration begins with, and `SPARSE`."""
  found = []
  pattern = rf'custom_call @({TRITON}|{SPARSE})\(.*?backend_config = "((?:[^"\\]|\\.)*)"'
  for target, config in re.findall(pattern, text):
    escaped = re.compile(rb'\\([0-9A-F]{2}|.)')
    packed = escaped.sub(lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else m[1], config.encode('latin1'))
    found.append(re.search(rb'[a-z]\w{5,}', zlib.decompress(packed))[0].decode() if packed else target)
  return found


@hopper.needs_plugins
@pytest.mark.slow
class KernelsTest(parameterized.TestCase):

  # Under vmap a launch is in a loop; experts have one of their own. Without either each is a step of the plan, below.
  @parameterized.parameters(('vmap', 1), ('experts', 2))
  def test_six_matmuls_and_ten_passes(self, kind, times):
    scale = jax.ShapeDtypeStruct((2,), jnp.float32)
    args = [*(hopper.struct(2, *side) for side in SIDES), {'up': scale, 'down': scale}]
    with (
      mock.patch.object(gain, 'expected', lambda *_: PAYS),
      mock.patch.object(api, '_candidates', lambda *_: ('mosaic_gpu', 'dense')),
    ):
      text = lowered(jax.vmap(step) if kind == 'vmap' else step, *args)
    for target, count in ((SPARSE, 6), (TRITON, 10)):
      self.assertEqual(text.count(f'custom_call @{target}('), times * count, target)

  @parameterized.parameters(POLICY, s24.ActivationPolicy(BLOCKS, dense_features=0.05), s24.ActivationPolicy())
  def test_the_steps_of_the_plan_are_the_kernels_in_their_order(self, policy):
    policy = dataclasses.replace(policy, implementation='sparse')
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    args = *(hopper.struct(*side) for side in SIDES), {'up': scale, 'down': scale}
    with hopper.hopper():
      steps = gain.plan_neurons(policy, TOKENS, D, HIDDEN, 'bfloat16').steps
    planned = [
      KERNELS[each.name] if isinstance(each, Pass) else SPARSE
      for each in steps if each.name in KERNELS or getattr(each, 'backend', None)
    ]  # fmt: skip
    if isinstance(policy.tokens, s24.TwoOfFour):
      planned = [name.replace('transpose_pack', 'transpose_pack_24') for name in planned]
    self.assertEqual(kernels(lowered(functools.partial(step, policy=policy), *args)), planned)
    self.assertEqual(planned.count(SPARSE), 6)


if __name__ == '__main__':
  absltest.main()
