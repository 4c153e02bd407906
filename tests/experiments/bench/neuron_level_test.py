"""The V:N:M benchmark on small shapes: what its records hold."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest
import jax

from experiments.bench import neuron_level
from pallas_kernels.vnm import api, mosaic_gpu
from pallas_kernels.vnm.format import decompress_operand, verify


class NeuronLevelBenchTest(absltest.TestCase):
  def test_records(self):
    names = [f'{kind}-64x2x8-{size}' for kind, size in (
      ('matmul', '16384x4096x16384'), ('ffn', '16384x4096x16384'),
    )] + ['pack-64x2x8-forward_masked-16384x16384', 'pack-64x2x8-tokens_gradient-16384x16384']
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
      folder = pathlib.Path(name)
      options = ['--tiny', '--rounds', '2', '--steps', '2', '--tune', str(folder / 'tuned')]
      failed = neuron_level.main(['--out', str(folder / 'records.jsonl'), *options, '--select', *names])
      self.assertEqual(failed, 0, out.getvalue())
      records = [json.loads(line) for line in (folder / 'records.jsonl').read_text().splitlines()]
      (tuned,) = (folder / 'tuned').glob(f'*/{api.OP}.json')
      (entry,) = json.loads(tuned.read_text())['entries']
    product, block, forward, tokens = records
    self.assertEqual([r['bench'] for r in records], ['vnm_matmul', 'ffn', 'memory_bound', 'memory_bound'])
    for record in records:
      self.assertContainsSubset(('device', 'versions', 'commit', 'command', 'samples_ms', 'pattern', 'recipe'), record)
      self.assertLen(record['samples_ms'], 2)
      self.assertFalse(record['headline'])
    self.assertLessEqual(product['error'], 4e-3)
    ratio = product['baselines']['dense']['median_ms'] / product['median_ms']
    self.assertAlmostEqual(product['speedup'], ratio, places=3)
    self.assertEqual(entry['key']['pattern'], '64:2:8')
    self.assertIn(block['baselines']['dense']['form'], ('dense', 'dense recompute'))
    # x [128, 256] read; a quarter of it, 2 bits for each of these, the columns' int32 and the dense copy written.
    self.assertEqual(forward['bytes'], 65536 + 65536 // 4 + 128 * 64 // 4 + 2 * 128 * 4 + 65536)
    # Half of the gradient and the pattern read, values written.
    self.assertEqual(tokens['bytes'], 65536 // 2 + 128 * 64 // 4 + 2 * 128 * 4 + 65536 // 4)

  def test_settings_can_be_built(self):
    for v in (64, 128, 256):
      problem = mosaic_gpu.Problem(16384, 4096, 8192, v, 16384, *[jax.numpy.dtype('bfloat16')] * 2, 'mn')
      for config in neuron_level.configs(v):
        mosaic_gpu.check_config(problem, config)

  def test_the_random_operand_is_legal(self):
    a = neuron_level.operand(128, 64, 64, 8, jax.random.key(0))
    verify(decompress_operand(a), v=64, m=8)


if __name__ == '__main__':
  absltest.main()
