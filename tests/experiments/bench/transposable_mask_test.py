import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import transposable_mask


class TransposableMaskBenchTest(parameterized.TestCase):
  def test_both_forms_agree(self):
    # Integers: sums are exact, and with magnitudes up to 2^20 ties of the best pattern do not occur.
    w = jax.random.randint(jax.random.key(0), (256, 256), -(2**20), 2**20).astype(jnp.float32)
    masks = [np.asarray(form(w)) for form in transposable_mask.FORMS.values()]
    np.testing.assert_array_equal(*masks)
    self.assertTrue((masks[0].reshape(64, 4, 64, 4).sum((1, 3)) == 8).all())

  def test_appends_a_record_and_prints_a_table(self):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
      results = pathlib.Path(folder) / 'new' / 'records.jsonl'
      for _ in range(2):
        transposable_mask.main(['--size', '256', '--rounds', '3', '--results', str(results)])
      records = [json.loads(line) for line in results.read_text().splitlines()]
    self.assertLen(records, 2)
    record = records[0]
    self.assertEqual((record['bench'], record['shape'], record['dtype']), ('transposable_mask', [256, 256], 'bfloat16'))
    self.assertContainsSubset(('device', 'versions', 'command', 'when', 'samples_ms', 'baselines'), record)
    for row in (record, record['baselines']['matmul_argmax']):
      self.assertLen(row['samples_ms'], 3)
      self.assertEqual(row['median_ms'], sorted(row['samples_ms'])[1])
    self.assertGreater(record['same_blocks'], 0.98)  # bfloat16 weights tie now and then
    self.assertRegex(out.getvalue(), r'matmul_argmax +\d')

  @parameterized.parameters('0', '6', '-4')
  def test_size_must_hold_whole_blocks(self, size):
    with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
      transposable_mask.main(['--size', size])
    self.assertIn('multiple of 4', err.getvalue())


if __name__ == '__main__':
  absltest.main()
