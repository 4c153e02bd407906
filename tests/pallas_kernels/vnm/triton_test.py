"""The Triton V:N:M packer without a GPU: machine code for three of them; its numerics are in interpreted_test.py."""

import functools
import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.operand import metadata_shape, SparseOperand
from tests.pallas_kernels import compiling, triton_interpreter


def _instructions(made):
  return len(re.findall(r'^\s+/\*[0-9a-f]{4,}\*/\s', made.sass, re.MULTILINE))


@absltest.skipUnless(triton_interpreter.HAS_TRITON, 'needs triton')
@pytest.mark.few
class CompileTest(parameterized.TestCase):

  _CASES = (((64, 8), 90), ((128, 8), 80), ((128, 8), 86), ((128, 16), 90), ((256, 8), 90))

  def _compile(self, kernel, arrays, constants, capability, warps):
    made = compiling.compile_for(kernel, arrays, constants, compute_capability=capability, num_warps=warps)
    self.assertEqual(made.stack_bytes, 0)
    self.assertGreater(made.count('LDG.E.128') + made.count('LDG.E.64'), 0)
    return made

  @parameterized.product(case=_CASES, gradient=(False, True))
  def test_rows(self, case, gradient):
    (v, m), capability = case
    from pallas_kernels.vnm import _rows
    from pallas_kernels.vnm import triton as packers

    kernel = _rows.pack_rows_as if gradient else _rows.pack_rows
    arrays = ['bfloat16', 'bfloat16', 'uint32', 'int32'] if gradient else ['bfloat16']
    arrays += ['bfloat16', 'bfloat16'] if gradient else ['bfloat16', 'uint32', 'int32', 'bfloat16', 'int32']
    # Instructions an entry, of which a thread has 128. First what the block calls.
    forms = ((False, 7), (True, 20)) if gradient else ((True, 13), (False, 20))
    for flag, most in forms if (v, m) == (128, 16) else forms[:1]:
      more = dict(MASKED=flag) if gradient else dict(RESIDUALS=flag)
      constants = packers.row_constants(4096, v, m, activation='squared_relu', **more)
      made = self._compile(kernel, arrays, constants, capability, packers.row_warps(v, m))
      self.assertLess(_instructions(made), most * 128)

  @parameterized.parameters((64, 8, 90, False), (128, 8, 80, False), (128, 8, 86, False), (128, 16, 90, True))
  def test_transpose_pack(self, v, m, capability, gradient):
    from pallas_kernels.vnm import _transpose
    from pallas_kernels.vnm import triton as packers

    constants = dict(R=4096, C=4096, V=v, M=m) | ({} if gradient else dict(SELECT=True))
    kernel = _transpose.transpose_pack_as if gradient else _transpose.transpose_pack
    arrays = ['bfloat16', 'uint32', 'uint32']
    arrays += ['uint32', 'int32', 'bfloat16'] if gradient else ['bfloat16', 'uint32', 'int32']
    warps = packers.transpose_warps(v, m)
    made = self._compile(kernel, arrays, constants, capability, warps)
    self.assertLess(_instructions(made), (2 if gradient else 9) * v * 16 * m // (32 * warps))

  @parameterized.parameters((8, 90, False), (8, 80, True), (16, 86, False), (16, 90, True), (4, 90, False))
  def test_transpose_pack_24(self, m, capability, gradient):
    from pallas_kernels.vnm import _transpose
    from pallas_kernels.vnm import triton as packers

    warps = packers.transpose_24_warps(m)
    kernel = _transpose.transpose_pack_24_as if gradient else _transpose.transpose_pack_24
    arrays = ['bfloat16', 'uint32', 'uint32', *(('uint32', 'bfloat16') if gradient else ('bfloat16', 'uint32'))]
    made = self._compile(kernel, arrays, dict(R=4096, C=4096, V=128, M=m), capability, warps)
    # Of each dense entry, of which a program has 64 rows of 16 groups.
    self.assertLess(_instructions(made), (7 if gradient else 10) * 64 * 16 * m // (32 * warps))

  def test_take_columns(self):
    from pallas_kernels.vnm import _dense

    constants = dict(C=4096, V=128, M=8, COUNT=256, ROWS=32, WIDTH=128)
    arrays = ['bfloat16', 'uint32', 'int32', 'int32', 'bfloat16']
    made = compiling.compile_for(_dense.take_columns, arrays, constants, compute_capability=80, num_warps=4)
    self.assertEqual(made.stack_bytes, 0)

  def test_expand(self):
    from pallas_kernels.vnm import _dense

    self._compile(_dense.expand_rows, ['bfloat16', 'uint32', 'bfloat16'], dict(K=4096, ROWS=64), 80, 2)
    made = compiling.compile_for(
      _dense.scatter_rows, ['bfloat16', 'uint32', 'int32', 'bfloat16'], dict(C=4096, V=128, M=8, ROWS=64),
      compute_capability=80, num_warps=2,
    )  # fmt: skip
    self.assertEqual(made.stack_bytes, 0)


@absltest.skipUnless(triton_interpreter.HAS_TRITON, 'needs triton')
class RefusalTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('v', dict(v=192, m=8), 'V of 64, 128 or 256'), ('m', dict(v=64, m=32), 'M of 4, 8 or 16'),
  )
  def test_packs(self, options, message):
    from pallas_kernels.vnm import triton as packers

    with self.assertRaisesRegex(NotImplementedError, message):
      packers.vnm_pack(jnp.ones((192, 512), jnp.bfloat16), **options)

  def test_operands(self):
    from pallas_kernels.vnm import reference
    from pallas_kernels.vnm import triton as packers

    a, *_ = jax.eval_shape(functools.partial(reference.vnm_pack, v=64, m=8), jnp.zeros((64, 128), jnp.bfloat16))
    with self.assertRaisesRegex(NotImplementedError, r'multiples of V and 16 M; found 64:2:8 of \[64, 128\]'):
      packers.transpose_pack(a, used=None, pattern=None)
    a, *_ = jax.eval_shape(functools.partial(reference.vnm_pack, v=64, m=8), jnp.zeros((64, 192), jnp.bfloat16))
    with self.assertRaisesRegex(NotImplementedError, r'columns in multiples of 16 M; found 64:2:8 of \[64, 192\]'):
      packers.transpose_pack_24(a, used=None, pattern=None)
    a, *_ = jax.eval_shape(functools.partial(reference.vnm_pack, v=16, m=8), jnp.zeros((64, 128), jnp.bfloat16))
    with self.assertRaisesRegex(NotImplementedError, 'V in multiples of 32'):
      packers.take_columns(a, jnp.zeros(3, jnp.int32))
    with self.assertRaisesRegex(NotImplementedError, 'V in multiples of 64 and whole tiles .* found 16:2:8'):
      packers.expand(a)
    a, *_ = jax.eval_shape(functools.partial(reference.vnm_pack, v=64, m=8), jnp.zeros((64, 128), jnp.bfloat16))
    with self.assertRaisesRegex(NotImplementedError, r'less than 2\^31 entries only, found 33554432 columns of 64'):
      jax.eval_shape(packers.take_columns, a, jax.ShapeDtypeStruct((2**25,), jnp.int32))

  @parameterized.parameters((64, 32, 'bfloat16'), (96, 64, 'bfloat16'), (64, 64, 'float32'))
  def test_expand(self, rows, columns, dtype):
    from pallas_kernels.vnm import triton as packers

    metadata = jnp.zeros(metadata_shape(rows, columns), jnp.uint32)
    operand = SparseOperand(jnp.zeros((rows, columns // 2), dtype), metadata)
    with self.assertRaisesRegex(NotImplementedError, rf'whole tiles .* found {dtype} of shape \({rows}, {columns}\)'):
      packers.expand(operand)


if __name__ == '__main__':
  absltest.main()
