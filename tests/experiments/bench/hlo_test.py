"""Which kernels a compiled program holds, and in which roles."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from experiments.bench import hlo

CALL = (
  '  %mpmd_map.{i} = bf16[512,256]{{1,0}} custom-call(%a, %b, %c), custom_call_target="{target}",'
  ' operand_layout_constraints={{bf16[256,{kept}]{{1,0}}, u32[4,4,128]{{2,1,0}}}}, metadata={{op_name="{name}"}}'
)


def program(*calls):
  return '\n'.join(
    CALL.format(i=i, target=target, kept=kept, name=name) for i, (target, kept, name) in enumerate(calls)
  )


class HloTest(absltest.TestCase):
  def test_roles_by_scope_then_by_shape(self):
    text = program(
      ('mosaic_gpu_v2', 128, 'jit(f)/jvp(mlp)/forward/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/transpose(jvp(mlp))/input_grad/kernel'),
      ('sparse24_cusparselt', 512, 'jit(f)/transpose(jvp(mlp))/weight_grad/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/jvp(mlp)/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/transpose(jvp(mlp))/rematted_computation/kernel'),
      ('mosaic_gpu_v2', 512, 'jit(f)/transpose(jvp(mlp))/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/transpose(jvp(mlp))/kernel'),
      ('triton_kernel_call', 128, 'jit(f)/transpose(jvp(mlp))/weight_grad/pack'),
    )
    self.assertEqual(
      hlo.sparse_calls(text, tokens=1024), {'forward': 3, 'input_grad': 2, 'weight_grad': 2, 'other': 0}
    )
    self.assertEqual(hlo.sparse_calls(text)['other'], 2)

  def test_names_of_a_real_program(self):
    def f(x):
      with jax.named_scope('optimizer'):
        return jnp.tanh(x @ x).sum()

    names = hlo.op_names(jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text())
    self.assertTrue(any('optimizer' in name for name in names.values()))


if __name__ == '__main__':
  absltest.main()
