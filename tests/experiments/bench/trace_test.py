"""Kinds of kernels, and the device time of a step by kind."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from experiments.bench import trace


class TraceTest(parameterized.TestCase):
  @parameterized.parameters(
    ('kernel_mosaic_gpu_kernel', '', 'GEMM sparse'),
    ('nvjet_hsh_192x192_64x4_2x1_v_bz_coopA_TNT', 'jit(step)/optimizer', 'GEMM dense'),
    ('gemm_fusion_dot_general_1', '', 'GEMM dense'),
    ('cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma', '', 'attention'),
    ('masked_kernel', '', 'pack'),
    ('mvue_kernel', '', 'pack'),
    ('mvue_scaled_kernel', '', 'pack'),
    ('backward_scaled_kernel', '', 'activation'),
    ('backward_kernel', 'jit(step)/transpose(jvp(mlp))', 'activation'),
    ('loop_multiply_fusion_7', 'jit(step)/optimizer/mul', 'optimizer'),
    ('loop_multiply_fusion_7', 'jit(step)/jvp(GPT2)/h/mlp/mul', 'activation'),
    ('input_reduce_fusion_2', 'jit(step)/jvp(GPT2)/h/ln_1/reduce_sum', 'normalisation'),
    ('input_reduce_fusion_3', 'jit(step)/jvp(loss)/reduce_max', 'loss'),
    ('MemcpyD2D', '', 'copy'),
    ('loop_add_fusion', '', 'other'),
    ('transpose_pack_as', 'jit(step)/h/mlp/triton_kernel_call', 'pack'),
  )
  def test_kinds(self, kernel, scopes, kind):
    self.assertEqual(trace.classify(kernel, scopes), kind)

  def test_sums_a_step_and_counts_overlap_once(self):
    kernels = [
      trace.Kernel('kernel_mosaic_gpu_kernel', '', 0, 2e6),
      trace.Kernel('nvjet', '', 1e6, 2e6),
      trace.Kernel('nvjet', '', 4e6, 2e6),
    ]
    summary = trace.summarize(kernels, 2)
    self.assertEqual(summary['by_kind_ms'] | {'GEMM sparse': 0, 'GEMM dense': 0}, dict.fromkeys(trace.KINDS, 0))
    self.assertEqual((summary['by_kind_ms']['GEMM sparse'], summary['by_kind_ms']['GEMM dense']), (1.0, 2.0))
    self.assertEqual((summary['busy_ms'], summary['idle_ms']), (2.5, 0.5))
    self.assertEqual(summary['top'][0], {'kernel': 'nvjet', 'kind': 'GEMM dense', 'calls': 1.0, 'ms': 2.0})
    self.assertIn('GEMM sparse', trace.table({'sparse': summary, 'dense': summary}))

  def test_a_trace_without_a_gpu_holds_no_kernels(self):
    f = jax.jit(lambda x: x + 1)
    self.assertEqual(trace.capture(lambda: f(jnp.ones(3)), 1, {}), [])
    self.assertIsNone(trace.summarize([], 1))


if __name__ == '__main__':
  absltest.main()
