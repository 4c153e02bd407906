"""What XLA makes of the block for two H100s: compiled without them, read from the program of one device."""

import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _device
import sparse24_jax as s24
from tests.pallas_kernels import compiling
from tests.sparse24_jax import hopper
from tests.sparse24_jax.hlo import calls, result, SPARSE, TRITON

TOKENS, D, HIDDEN = 640, 128, 256


@hopper.needs_plugins
@pytest.mark.few
class BlockTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('whole_weights', (), False), ('weights_divided', ('d',), False), ('gate_divided', (None, 'd'), True),
  )  # fmt: skip
  @pytest.mark.slow
  def test_kernels_on_local_tokens(self, spec, gated):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
      platform='cuda', target_config=compiling.description(hopper.TARGET), topology='1x1x2'
    )
    mesh = topologies.make_mesh(topology, (2,), ('d',))

    def struct(*shape, spec=(), dtype=jnp.bfloat16):
      sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

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
    with hopper.hopper(), mock.patch.object(_device, 'arrays_are_whole', lambda: False):
      hlo = jax.jit(step).lower(x, weights, states, x, struct(2, dtype=jnp.uint32)).compile().as_text() or ''
    lines = hlo.splitlines()
    here = TOKENS // 2
    found = [result(line)[1] for line in calls(lines, SPARSE)]
    first = (1 + gated) * HIDDEN  # gate and up are one product
    self.assertCountEqual(found, [(here, first), (here, HIDDEN), *[(here, D)] * 2, (D, first), (HIDDEN, D)])
    self.assertLen(calls(lines, TRITON), 4 + gated)
    self.assertNotRegex(hlo, r'__cublas|dot\(')
    kinds = re.findall(r' (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(', hlo)
    # All gradients are joined in one sum, of which each device gets its part where the weights lie in parts; these
    # are gathered packed, and only they.
    self.assertLen([kind for kind in kinds if kind != 'all-gather'], 1)
    self.assertEqual(set(kinds), {'reduce-scatter', 'all-gather'} if spec else {'all-reduce'})
    self.assertEmpty([line for line in lines if re.search(rf'\[{TOKENS},\d+\]', line) and 'all-' in line])


if __name__ == '__main__':
  absltest.main()
