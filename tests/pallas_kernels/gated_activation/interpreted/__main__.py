"""The Triton activation kernels against the reference, in Triton's interpreter. Run by interpreted_test.py."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_activation import reference
from pallas_kernels.gated_activation import triton as gated
from pallas_kernels.operand import metadata_shape
from pallas_kernels.pack import reference as pack_reference
from pallas_kernels.triton_blocks import launch
from tests.pallas_kernels import triton_interpreter

TOLERANCE = {jnp.bfloat16: 4e-3, jnp.float16: 5e-4}  # half a unit in the last place, relative


def difference(found, expected):
  found, expected = (np.asarray(x).astype(np.float32) for x in (found, expected))
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


class InterpretedTest(parameterized.TestCase):

  @parameterized.parameters(
    ('silu', True, jnp.bfloat16), ('gelu', False, jnp.float16), ('squared_relu', False, jnp.bfloat16),
    ('relu', True, jnp.float16), ('gelu_exact', True, jnp.bfloat16),
  )  # fmt: skip
  def test_backward_pack(self, activation, gate, dtype):
    features, tokens = 64, 20
    wide = features * (2 if gate else 1)
    shapes = (tokens, features), (tokens, wide)
    rng = np.random.default_rng(0)
    dh, z = ((i * rng.standard_normal(shape)).astype(dtype) for i, shape in enumerate(shapes, 1))
    key, config = jax.random.key(2), launch.Config()
    outputs = [(shapes[1], dtype), ((wide, tokens // 2), dtype), (metadata_shape(wide, tokens), jnp.uint32)]
    dz, values, metadata = triton_interpreter.run(
      gated.backward_kernel, config.grid(1, *shapes[0]), [dh, z, launch.draw_parameters(key, (0, 0, 0))], outputs,
      dict(ACTIVATION=activation, GATED=gate, **config.constants(*shapes[0])),
    )  # fmt: skip
    backward = functools.partial(reference.activation_backward, activation=activation, gated=gate)
    expected = jax.jit(backward)(dh, z)
    self.assertLess(difference(dz, expected), TOLERANCE[dtype])
    # The exponential may round otherwise; the sample of what came out may not.
    pick = functools.partial(pack_reference.mvue_pack, origin=(0, 0, 0), dtype=jnp.dtype(dtype))
    operand = jax.jit(pick)(jnp.asarray(dz), key).operand
    np.testing.assert_array_equal(metadata, np.asarray(operand.metadata))
    np.testing.assert_array_equal(values.view(np.uint16), np.asarray(operand.values).view(np.uint16))

  @parameterized.parameters(('silu', True), ('gelu', False))
  def test_backward_pack_float8(self, activation, gate):
    features, tokens, dtype, out = 64, 20, jnp.bfloat16, jnp.dtype(jnp.float8_e5m2)
    wide = features * (2 if gate else 1)
    shapes = (tokens, features), (tokens, wide)
    rng = np.random.default_rng(0)
    dh, z = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    key, config, scale = jax.random.key(2), launch.Config(), jnp.float32(5000)
    options = dict(ACTIVATION=activation, GATED=gate, **config.constants(*shapes[0]))
    parameters, metadata = launch.draw_parameters(key, (0, 0, 0)), (metadata_shape(wide, tokens), jnp.uint32)
    # The float8 kernel must make of its dz what the packer makes of the same dz in bfloat16.
    dz = triton_interpreter.run(
      gated.backward_kernel, config.grid(1, *shapes[0]), [dh, z, parameters],
      [(shapes[1], dtype), ((wide, tokens // 2), dtype), metadata], options,
    )[0]  # fmt: skip
    found = triton_interpreter.run(
      gated.backward_scaled_kernel, config.grid(1, *shapes[0]), [dh, z, parameters, scale.reshape(1)],
      [(shapes[1], out), ((wide, tokens // 2), out), metadata], options,
    )  # fmt: skip
    pick = functools.partial(pack_reference.mvue_pack, origin=(0, 0, 0), dtype=out)
    expected = jax.jit(pick)(jnp.asarray(dz), key, scale)
    np.testing.assert_array_equal(found[2], np.asarray(expected.operand.metadata))
    triton_interpreter.assert_equal_float8(found[1], expected.operand.values)
    triton_interpreter.assert_equal_float8(found[0], expected.dense)


if __name__ == '__main__':
  absltest.main()
