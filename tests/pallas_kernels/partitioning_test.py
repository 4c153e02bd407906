"""Kernels on divided arrays: what each device gets, which exchanges there are, and that results are one device's."""

import logging
import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from pallas_kernels import _partitioning, formats
from pallas_kernels._partitioning import Rule
from pallas_kernels.pack import api as pack
from pallas_kernels.sparse_matmul import api, operand

BF16 = jnp.bfloat16


def mesh(kind: str, shape=(2, 2)) -> Mesh:
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, ('d', 't'), axis_types=(getattr(AxisType, kind),) * 2)


def put(x, on: Mesh, *spec):
  return jax.device_put(x, NamedSharding(on, PartitionSpec(*spec)))


def exchanges(hlo: str) -> dict[str, int]:
  found = re.findall(r' (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(', hlo)
  return {kind: found.count(kind) for kind in dict.fromkeys(found)}


def integers(seed: int, *shape: int):
  """Numbers whose sums are exact in bfloat16, in any order."""
  return jax.random.randint(jax.random.key(seed), shape, -1, 2).astype(BF16)


def sparse(seed: int, m: int, k: int) -> operand.SparseOperand:
  mask = jnp.tile(jnp.array([True, False, True, False]), (m, k // 4))
  return operand.to_operand(formats.compress(jnp.where(mask, integers(seed, m, k), 0).astype(BF16), mask, axis=-1))


class RuleTest(parameterized.TestCase):

  @parameterized.parameters(
    (((128, 64), (2, 2, 128)), {'m': 2, 'k': 2}),
    (((192, 64), (3, 2, 128)), {'m': 3, 'k': 2}),
    (((100, 64), (2, 2, 128)), {'k': 2}),  # the last tile is not full
    (((128, 32), (2, 1, 128)), {'m': 2}),  # one unit cannot be divided
  )
  def test_units_are_whole_in_every_array(self, shapes, expected):
    self.assertEqual(Rule(('m*64 k*32', 'm k .'), (), ('m', 'k')).units(shapes, ()), expected)

  def test_descriptions(self):
    self.assertEqual(_partitioning.axes('n k*64 .'), (('n', 1), ('k', 64), None))
    self.assertEqual(_partitioning.axes(''), ())
    self.assertEqual(_partitioning.undivided(jnp.zeros((2, 3))), '. .')


class SparseMatmulTest(parameterized.TestCase):

  @parameterized.product(
    kind=('Auto', 'Explicit'),
    case=(
      # How rows and sum of A are divided, then B; its layout; what is exchanged; how D is divided.
      ((None, None), ('d', None), 'nk', set(), ('d', None)),
      ((None, None), (('d', 't'), None), 'nk', set(), (('d', 't'), None)),
      (('t', None), ('d', None), 'nk', set(), ('d', 't')),  # a weight divided by columns
      ((None, 't'), ('d', 't'), 'nk', {'all-reduce'}, ('d', None)),  # and by rows
      (('d', None), ('d', None), 'nk', {'all-gather'}, ('d', None)),  # a weight divided as tokens are
      ((None, 'd'), ('d', None), 'kn', {'all-reduce'}, (None, None)),  # a weight gradient
      (('t', 'd'), ('d', None), 'kn', {'all-reduce'}, (None, 't')),
    ),
  )  # fmt: skip
  def test_products_of_parts(self, kind, case):
    of_a, of_b, layout, expected, of_d = case
    on, a, b = mesh(kind), sparse(0, 128, 128), integers(1, *((64, 128) if layout == 'nk' else (128, 64)))
    bias, scale = integers(2, 128), jnp.float32(2)

    def f(a, b, bias):
      return api.sparse_matmul(
        a, b, bias=bias, activation='relu', a_scale=scale, b_layout=layout, out_layout='nm', implementation='dense'
      )

    parts = operand.SparseOperand(put(a.values, on, *of_a), put(a.words, on, *of_a))
    compiled = jax.jit(f).lower(parts, put(b, on, *of_b), put(bias, on)).compile()
    exchanged = exchanges(compiled.as_text())
    self.assertEqual(set(exchanged), expected)
    self.assertEqual(exchanged.get('all-reduce', 1), 1)
    found = compiled(parts, put(b, on, *of_b), put(bias, on))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(f(a, b, bias)))
    self.assertTrue(found.sharding.is_equivalent_to(NamedSharding(on, PartitionSpec(*of_d)), 2))

  def test_one_device_of_several_gets_the_bare_call(self):
    there = jax.devices()[3]
    a, b = jax.device_put((sparse(0, 64, 64), integers(1, 8, 64)), there)
    f = jax.jit(lambda a, b: api.sparse_matmul(a, b, implementation='dense'))
    compiled = f.lower(a, b).compile()
    self.assertEqual(compiled(a, b).devices(), {there})
    self.assertEqual(exchanges(compiled.as_text()), {})
    self.assertNotIn('CustomSPMDPartitioning', f.lower(a, b).as_text())

  def test_what_does_not_divide_is_gathered_and_said(self):
    on = mesh('Auto', (4, 1))
    a, b = sparse(0, 192, 64), integers(1, 8, 64)  # three tiles of rows for four devices
    parts = operand.SparseOperand(put(a.values, on, 'd'), put(a.words, on))
    _partitioning._log_once.cache_clear()
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      found = jax.jit(lambda a, b: api.sparse_matmul(a, b, implementation='dense'))(parts, put(b, on))
    self.assertRegex(logs.output[0], r"sparse_matmul: axes \['d'\] .*'m', which is gathered: its 3 units are no mult")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(api.sparse_matmul(a, b, implementation='dense')))


class PackTest(parameterized.TestCase):

  @parameterized.parameters('Auto', 'Explicit')
  def test_weights_are_packed_where_they_lie(self, kind):
    on, w = mesh(kind), jax.random.normal(jax.random.key(0), (2, 128, 128), BF16)
    previous = pack.transposable_pack(jax.random.normal(jax.random.key(1), w.shape, BF16)).codes
    expected = pack.transposable_pack(w, previous)
    args = put(w, on, None, 'd', 't'), put(previous, on, None, 'd', 't')
    compiled = jax.jit(pack.transposable_pack).lower(*args).compile()
    found = compiled(*args)
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, (found, expected)))
    self.assertEqual(exchanges(compiled.as_text()), {'all-reduce': 1})  # the number of flips
    for part, axes in ((found.rows, ('d', 't')), (found.columns, ('t', 'd'))):
      for leaf in (part.values, part.words):
        wanted = NamedSharding(on, PartitionSpec(None, *axes))
        self.assertTrue(leaf.sharding.is_equivalent_to(wanted, leaf.ndim))

  def test_under_vmap(self):
    w, scale = jax.random.normal(jax.random.key(0), (2, 64, 64)), jnp.array([1.0, 2.0])
    found = jax.vmap(pack.soft_threshold_pack)(w, scale)
    jax.tree.map(np.testing.assert_array_equal, found, pack.soft_threshold_pack(w, scale))


if __name__ == '__main__':
  absltest.main()
