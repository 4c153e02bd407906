"""What XLA makes of the block for 2, 8 and 64 H100s: compiled without them, read from the program of one device."""

import functools
import math
import operator
import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _device
import sparse24_jax as s24
from sparse24_jax.precision import NATIVE
from tests.pallas_kernels import compiling
from tests.sparse24_jax import hopper
from tests.sparse24_jax.hlo import calls, result, SPARSE, TRITON

TOKENS, D, HIDDEN = 640, 128, 256
LAYERS = 2


def gpus(grid, number):
  """A mesh of so many, in so many machines: '8x1x8'."""
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='cuda', target_config=compiling.description(hopper.TARGET), topology=grid
  )
  return topologies.make_mesh(topology, (number,), ('d',))


def on(mesh, *shape, spec=(), dtype=jnp.bfloat16):
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(f, *args):
  with hopper.hopper(), mock.patch.object(_device, 'arrays_are_whole', lambda: False):
    return jax.jit(f).lower(*args).compile().as_text() or ''


@hopper.needs_plugins
@pytest.mark.few
class BlockTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('whole_weights', (), False), ('weights_divided', ('d',), False), ('gate_divided', (None, 'd'), True),
  )  # fmt: skip
  @pytest.mark.slow
  def test_kernels_on_local_tokens(self, spec, gated):
    struct = functools.partial(on, gpus('1x1x2', 2))

    def step(x, weights, states, dy, key):
      def block(x, weights):
        key_ = jax.random.wrap_key_data(key)
        gate = {'w_gate': weights['gate'], 'activation': 'silu'} if gated else {}
        return s24.ffn(x, weights['up'], weights['down'], states, policy=hopper.POLICY, key=key_, **gate)

      y, vjp = jax.vjp(block, x, weights)
      dx, dw = vjp(dy)
      # As an optimizer that holds its part of the weights wants them.
      return y, dx, jax.lax.with_sharding_constraint(dw, jax.tree.map(lambda w: w.sharding, shapes))

    sides = {'up': (D, HIDDEN), 'down': (HIDDEN, D)} | ({'gate': (D, HIDDEN)} if gated else {})
    weights = {role: struct(*s, spec=spec) for role, s in sides.items()}
    states = {role: struct(*s, spec=spec, dtype=jnp.bool_) for role, s in sides.items()}
    shapes, x = weights, struct(TOKENS, D, spec=('d',))
    hlo = compiled(step, x, weights, states, x, struct(2, dtype=jnp.uint32))
    lines = hlo.splitlines()
    here = TOKENS // 2
    found = [result(line)[1] for line in calls(lines, SPARSE)]
    first = (1 + gated) * HIDDEN  # gate and up are one matmul
    self.assertCountEqual(found, [(here, first), (here, HIDDEN), *[(here, D)] * 2, (D, first), (HIDDEN, D)])
    self.assertLen(calls(lines, TRITON), 4 + gated)
    self.assertNotRegex(hlo, r'__cublas|dot\(')
    kinds = re.findall(r' (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(', hlo)
    # All gradients are joined in one sum, of which each device gets its part where the weights lie in parts; these
    # are gathered packed, and only they.
    self.assertLen([kind for kind in kinds if kind != 'all-gather'], 1)
    self.assertEqual(set(kinds), {'reduce-scatter', 'all-gather'} if spec else {'all-reduce'})
    self.assertEmpty([line for line in lines if re.search(rf'\[{TOKENS},\d+\]', line) and 'all-' in line])

  @parameterized.named_parameters(
    ('in_a_loop', '8x1x8', 64, 'loop', 4, 2.25), ('one_by_one', '8x1x8', 64, '', 2, 2.25),
    ('computed_again', '1x1x8', 8, 'again', 4, 3),
  )  # fmt: skip
  @pytest.mark.slow
  def test_bytes_of_a_divided_weight_that_a_step_gathers(self, grid, number, how, dense, sparse):
    """A packed weight takes 9/8 bytes each way, as docs/scale.md says."""
    mesh = gpus(grid, number)
    # More tokens on a device than neurons in all: of fewer XLA would gather the tokens.
    hidden = 64 * 8 * 8
    sides = {'gate': (D, hidden), 'up': (D, hidden), 'down': (hidden, D)}
    specs = {role: (None, *('d' if length == hidden else None for length in side)) for role, side in sides.items()}
    weights, masks = (
      {role: on(mesh, LAYERS, *side, spec=specs[role], dtype=dtype) for role, side in sides.items()}
      for dtype in (jnp.bfloat16, jnp.bool_)
    )
    x = on(mesh, number * (hidden + 1024), D, spec=('d',))

    def layer(x, w, state, key):
      if state is None:
        y = (jax.nn.silu(x @ w['gate']) * (x @ w['up'])) @ w['down']
      else:
        y = s24.ffn(x, w['up'], w['down'], state, policy=hopper.POLICY, key=key, w_gate=w['gate'], activation='silu')
      return jax.lax.with_sharding_constraint(x + y, rows)

    def step(x, weights, masks, key):
      form, keys = s24.transposable().form, jax.random.split(jax.random.wrap_key_data(key), LAYERS)
      packed = masks and {
        role: jax.vmap(lambda w, mask: NATIVE.pack(form, w, mask, jnp.bfloat16))(w, masks[role])
        for role, w in weights.items()
      }
      call = jax.checkpoint(layer) if how == 'again' else layer

      def loss(x, weights):
        if how == 'loop':
          return jax.lax.scan(lambda x, given: (call(x, *given), None), x, (weights, packed, keys))[0].var()
        for i in range(LAYERS):
          w, state = jax.tree.map(operator.itemgetter(i), (weights, packed))
          x = call(x, w, state, keys[i])
        return x.var()

      dx, dw = jax.grad(loss, (0, 1))(x, weights)
      return dx, jax.lax.with_sharding_constraint(dw, jax.tree.map(lambda w: w.sharding, shapes))

    rows, shapes = x.sharding, weights
    times = LAYERS if how == 'loop' else 1  # a program has the body of a loop once
    for given, expected in ((None, dense), (masks, sparse)):
      hlo = compiled(step, x, weights, given, on(mesh, 2, dtype=jnp.uint32))
      found = times * _gathered(hlo) / (LAYERS * 3 * D * hidden)
      self.assertEqual(found, expected, 'sparse' if given else 'dense')
      self.assertNotRegex(hlo, r' (all-to-all|collective-permute)(-start)?\(')


def _gathered(hlo):
  """Bytes of what all-gathers give."""
  sizes, total = {'bf16': 2, 'u32': 4}, 0
  for results, start in re.findall(r' = (.*?) all-gather(-start)?\(', hlo):
    arrays = re.findall(r'(\w+)\[([\d,]+)\]', results)
    for dtype, shape in arrays[len(arrays) // 2 :] if start else arrays:  # what starts names its arguments, too
      total += sizes[dtype] * math.prod(map(int, shape.split(',')))
  return total


if __name__ == '__main__':
  absltest.main()
