"""What a memory-bound pass costs by the records of a GPU, here one in a temporary folder."""

import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from pallas_kernels import _records, costs

HEAD = dict(device='GPU', driver='1', versions={'jax': '0'}, when='2025-12', copy_tb_s=3.0, pass_tb_s=2.0)


def record(op: str, tb_s: float, *, bench: str = 'memory_bound', implementation: str = 'triton', ms: float = 0.5):
  return HEAD | dict(bench=bench, op=op, implementation=implementation, bytes=round(tb_s * ms * 1e9), median_ms=ms)


class CostsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = pathlib.Path(temporary.name)
    self.path = self.folder / 'gpu' / 'memory_bound.json'
    self.path.parent.mkdir()
    costs.write([
      record('a', 9.0, bench='other'), record('a', 2.5), record('b', 1.25), record('a', 2.0, ms=0.125),
      record('a', 0.5, implementation='xla'), record('c', 4.0, implementation='xla'),
    ], self.path)  # fmt: skip

  def test_keeps_the_slowest_of_an_op_and_that_of_xla_where_there_is_no_kernel(self):
    kept = json.loads(self.path.read_text())
    self.assertEqual(kept, HEAD | dict(tb_s={'a': 2.0, 'b': 1.25, 'c': 4.0}))

  def test_passes_in_8_bits_have_a_file_of_their_own(self):
    costs.write([record('quantize_both', 2.0) | dict(copy_tb_s=2.5)], self.path.with_name('memory_bound_fp8.json'))
    for op, ms in (('quantize_both', 1.005), ('b', 1.605), (costs.COPY, 1.005)):  # the first file's pass
      found = costs.expected_ms('gpu', op, 2_000_000_000, folder=self.folder)
      assert found is not None
      self.assertAlmostEqual(found, ms, places=12)

  def test_the_newest_counts_of_what_several_files_have(self):
    for when, name, tb_s in (('2026-02', 'pack', 4.0), ('2026-01', 'gated_activation', 8.0)):
      costs.write([record('a', tb_s) | dict(when=when)], self.path.with_name(f'memory_bound_{name}.json'))
    self.assertEqual(costs.expected_ms('gpu', 'a', 2_000_000_000, folder=self.folder), 0.505)

  def test_what_is_written_counts_at_once(self):
    self.assertEqual(costs.expected_ms('gpu', 'a', 2_000_000_000, folder=self.folder), 1.005)
    costs.write([record('a', 4.0)], self.path)
    self.assertEqual(costs.expected_ms('gpu', 'a', 2_000_000_000, folder=self.folder), 0.505)

  def test_milliseconds_are_bytes_over_bandwidth_and_five_microseconds(self):
    for op, size, ms in (('a', 2_000_000_000, 1.005), ('b', 10_000_000, 0.013), ('b', 0, 0.005)):
      found = costs.expected_ms('gpu', op, size, folder=self.folder)
      assert found is not None
      self.assertAlmostEqual(found, ms, places=12)

  @parameterized.parameters(('gpu', 'd'), ('other_gpu', 'a'))
  def test_nothing_where_nothing_was_measured(self, device, op):
    self.assertIsNone(costs.expected_ms(device, op, 1 << 20, folder=self.folder))

  def test_shipped_bandwidths_are_below_that_of_the_memory(self):
    for path in _records.TUNED.glob('*/memory_bound*.json'):
      kept = json.loads(path.read_text())
      for op, tb_s in kept['tb_s'].items():
        self.assertBetween(tb_s, 0.5 * kept['copy_tb_s'], 1.2 * kept['copy_tb_s'], op)


if __name__ == '__main__':
  absltest.main()
