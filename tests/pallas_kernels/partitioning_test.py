"""Kernels on divided arrays: what each device gets, which exchanges there are, and that results are one device's."""

import functools
import logging
import re
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from pallas_kernels import _dispatch, _partitioning, _triton, formats, operand
from pallas_kernels._partitioning import Rule
from pallas_kernels.pack import api as pack
from pallas_kernels.sparse_matmul import api
from pallas_kernels.vnm import api as vnm
from tests.draws import gaussian

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
  return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape).astype(BF16))


_compress = jax.jit(lambda w, mask: operand.to_operand(formats.compress(w, mask, axis=-1)))


def sparse(seed: int, m: int, k: int) -> operand.SparseOperand:
  mask = np.tile(np.array([True, False, True, False]), (m, k // 4))
  return _compress(integers(seed, m, k) * mask.astype(BF16), mask)


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
  @pytest.mark.few(4)
  def test_matmuls_of_parts(self, kind, case):
    of_a, of_b, layout, expected, of_d = case
    on, a, b = mesh(kind), sparse(0, 128, 128), integers(1, *((64, 128) if layout == 'nk' else (128, 64)))
    bias, scale = integers(2, 128), jnp.float32(2)

    def f(a, b, bias):
      return api.sparse_matmul(
        a, b, bias=bias, activation='relu', a_scale=scale, b_layout=layout, out_layout='nm', implementation='dense'
      )

    parts = operand.SparseOperand(put(a.values, on, *of_a), put(a.metadata, on, *of_a))
    compiled = jax.jit(f).lower(parts, put(b, on, *of_b), put(bias, on)).compile()
    exchanged = exchanges(compiled.as_text())
    self.assertEqual(set(exchanged), expected)
    self.assertEqual(exchanged.get('all-reduce', 1), 1)
    found = compiled(parts, put(b, on, *of_b), put(bias, on))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(f)(a, b, bias)))
    self.assertTrue(found.sharding.is_equivalent_to(NamedSharding(on, PartitionSpec(*of_d)), 2))

  def test_one_device_of_several_gets_the_bare_call(self):
    there = jax.devices()[3]
    a, b = jax.device_put((sparse(0, 64, 64), integers(1, 8, 64)), there)
    f = jax.jit(lambda a, b: api.sparse_matmul(a, b, implementation='dense'))
    compiled = f.lower(a, b).compile()
    self.assertEqual(compiled(a, b).devices(), {there})
    self.assertEqual(exchanges(compiled.as_text()), {})
    self.assertNotIn('CustomSPMDPartitioning', f.lower(a, b).as_text())

  def test_arrays_of_one_device_under_a_mesh_that_is_set(self):
    a, b = sparse(0, 64, 64), integers(1, 8, 64)
    f = lambda a, b: api.sparse_matmul(a, b, implementation='dense')  # noqa: E731
    with jax.set_mesh(mesh('Auto', (8, 1))):
      found = jax.jit(f)(a, b)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(f(a, b)))

  def test_what_does_not_divide_is_gathered_and_said(self):
    on = mesh('Auto', (4, 1))
    a, b = sparse(0, 192, 64), integers(1, 8, 64)  # three tiles of rows for four devices
    parts = operand.SparseOperand(put(a.values, on, 'd'), put(a.metadata, on))
    _dispatch.log_once.cache_clear()
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      f = jax.jit(lambda a, b: api.sparse_matmul(a, b, implementation='dense'))
      found = f(parts, put(b, on))
    self.assertRegex(logs.output[0], r"sparse_matmul: axes \['d'\] .*'m', which is gathered: its 3 units are no mult")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(f(a, b)))


class PackTest(parameterized.TestCase):

  @parameterized.parameters('Auto', 'Explicit')
  def test_weights_are_packed_where_they_lie(self, kind):
    on, w = mesh(kind), gaussian(0, (2, 128, 128), BF16)
    expected, divided = jax.jit(pack.transposable_pack)(w), put(w, on, None, 'd', 't')
    compiled = jax.jit(pack.transposable_pack).lower(divided).compile()
    found = compiled(divided)
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, (found, expected)))
    self.assertEqual(exchanges(compiled.as_text()), {})
    for part, axes in ((found.rows, ('d', 't')), (found.columns, ('t', 'd'))):
      for leaf in (part.values, part.metadata):
        wanted = NamedSharding(on, PartitionSpec(None, *axes))
        self.assertTrue(leaf.sharding.is_equivalent_to(wanted, leaf.ndim))

  def test_twelve_tiles_on_eight_devices_are_gathered_and_said(self):
    """The partitioner would give words of 12 tiles to a half of the devices, by a part of the mesh axis."""
    on, w = mesh('Auto', (8, 1)), gaussian(0, (768, 64), BF16)
    f = jax.jit(functools.partial(pack.soft_threshold_pack, axis=-1))
    _dispatch.log_once.cache_clear()
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      found = f(put(w, on, 'd'), put(jnp.float32(2), on))
    said = '\n'.join(logs.output)
    self.assertRegex(said, r"soft_threshold_pack: axes \['d'\] .*'r', which is gathered: its 12 units")
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, (found, f(w, jnp.float32(2)))))

  @parameterized.parameters('Auto', 'Explicit')
  @pytest.mark.few
  def test_masks_are_searched_where_weights_lie(self, kind):
    w, on = gaussian(0, (2, 8, 16)), mesh(kind)

    backends = {'triton': 'pallas_kernels.pack.reference:transposable_pack'}  # the mask, by the packer's path
    with (
      mock.patch.object(pack, 'candidates', lambda *_: ['triton']),
      mock.patch.object(_dispatch, 'in_jnp_and_triton', lambda op, folder: backends),
    ):
      compiled = jax.jit(pack.transposable_mask).lower(put(w, on, None, 'd', 't')).compile()
    found = compiled(put(w, on, None, 'd', 't'))
    expected = jax.jit(pack.transposable.transposable_mask)(w)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    self.assertEqual(exchanges(compiled.as_text()), {})
    self.assertTrue(found.sharding.is_equivalent_to(NamedSharding(on, PartitionSpec(None, 'd', 't')), 3))


def largest(x):
  """The largest entry, by a call that XLA cannot see into and that has no batching rule."""
  return jax.pure_callback(lambda x: x.max(), jax.ShapeDtypeStruct((), x.dtype), x)


class VmapTest(parameterized.TestCase):

  def test_a_named_packer_runs_once_a_matrix(self):
    w, scale = gaussian(0, (2, 64, 64), BF16), jnp.array([1.0, 2.0])

    def fake(w, scale, **_):
      return pack.Packed(operand.SparseOperand(*(largest(w) * scale.astype(w.dtype) * jnp.ones_like(a) for a in made)))

    made = jax.eval_shape(pack.soft_threshold_pack, w[0], scale[0]).operand
    made = jnp.zeros(made.values.shape, BF16), jnp.zeros(made.metadata.shape, BF16)
    with mock.patch.object(_dispatch, 'load', lambda path: fake):
      found = jax.vmap(functools.partial(pack.soft_threshold_pack, implementation='triton'))(w, scale)
    np.testing.assert_array_equal(found.operand.values[:, 0, 0], w.max((1, 2)) * scale.astype(BF16))

  def test_triton_kernels_are_launched_one_after_another(self):
    x = jnp.array([[1.0, 3.0], [2.0, 0.0]])
    fake = mock.Mock()
    fake.triton_call = lambda x, **_: [largest(x)]
    with mock.patch.object(_triton, '_jax_triton', lambda: fake):
      (found,) = jax.vmap(lambda x: _triton.call(None, x, out_shape=[x[0]], grid=(1,), num_warps=1))(x)
    self.assertEqual(found.tolist(), [3.0, 2.0])


class MeshTest(parameterized.TestCase):

  def test_an_axis_of_one_device_divides_nothing(self):
    on, a, b = mesh('Explicit', (4, 1)), sparse(0, 64, 64), integers(1, 8, 64)
    parts = operand.SparseOperand(put(a.values, on, 't'), put(a.metadata, on, 't'))  # a single tile of rows
    f = jax.jit(lambda a, b: api.sparse_matmul(a, b, out_layout='nm', implementation='dense'))
    _dispatch.log_once.cache_clear()
    with self.assertNoLogs('pallas_kernels', logging.INFO):
      found = f(parts, put(b, on, 'd'))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(f(a, b)))

  def test_an_option_that_confuses_ops_in_the_cache_is_refused(self):
    name = 'jax_remove_custom_partitioning_ptr_from_cache_key'
    jax.config.update(name, True)
    self.addCleanup(jax.config.update, name, False)
    f = functools.partial(api.sparse_matmul, implementation='dense')
    with self.assertRaisesRegex(ValueError, f'sparse_matmul: the option {name} is set'):
      jax.eval_shape(f, sparse(0, 64, 64), integers(1, 8, 64))
    on = mesh('Explicit')
    jax.eval_shape(f, sparse(0, 64, 64), put(integers(1, 8, 64), on))  # types say it all: no such call

  @parameterized.parameters((('Explicit', 'Auto'), False), (('Auto', 'Auto'), True), (('Explicit', 'Explicit'), True))
  def test_meshes_with_axes_of_both_kinds_are_not_served(self, kinds, expected):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    on = Mesh(devices, ('d', 't'), axis_types=tuple(getattr(AxisType, kind) for kind in kinds))
    seen = []
    jax.eval_shape(lambda x: seen.append(_partitioning.serves(x)), put(jnp.zeros((2, 2)), on))
    with jax.set_mesh(on):
      seen.append(_partitioning.serves())
    self.assertEqual(seen, [expected] * 2)

  def test_that_vnm_is_gathered_is_said(self):
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      for _ in range(2):
        jax.eval_shape(functools.partial(vnm.vnm_pack, v=1, m=8), integers(0, 1, 8))
    self.assertLen(logs.output, 1)
    self.assertIn('V:N:M', logs.output[0])


if __name__ == '__main__':
  absltest.main()
