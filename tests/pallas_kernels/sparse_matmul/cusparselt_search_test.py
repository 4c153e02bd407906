"""The search over cuSPARSELt's algorithms, with a made-up library whose fastest algorithms are wrong."""

from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _tuning
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.sparse_matmul import cusparselt, cusparselt_search, mosaic_gpu

_BF16 = jnp.dtype('bfloat16')
_PROBLEM = mosaic_gpu.Problem(32, 32, 64, _BF16, _BF16, _BF16)
# What each algorithm takes, in ms; -1 is the library's own choice.
_TIMES = {-1: 2.3, 0: 2.0, 1: 1.0, 2: 1.5, 3: 0.5, 4: 3.0}
_WRONG, _UNSTABLE, _FAILS = 3, 1, 4


class _Algorithm:
  """The matmul by one setting: its result, and how long it says it takes."""

  def __init__(self, config):
    self.config, self.calls = config, 0
    self.ms = _TIMES[config.algorithm] * (0.9 if config.split_k == 2 and config.split_k_mode == 1 else 1.1)

  def __call__(self, a, b):
    del a
    self.calls += 1
    if self.config.algorithm == _FAILS:
      raise jax.errors.JaxRuntimeError('status 7')
    if self.config.algorithm == _WRONG:
      return 2 * b
    return b + (self.calls if self.config.algorithm == _UNSTABLE else 0) * jnp.float32(1e-5)


class SearchTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.a = jnp.ones((32, 64))
    self.b = jnp.linspace(1.0, 2.0, 64)

    def compiled(p, configs, a, b):
      del p, a, b
      return [NotImplementedError('split_k refused') if c.split_k == 4 else _Algorithm(c) for c in configs]

    for target, name, value in (
      (library, 'algorithms', lambda *args, **kwargs: 5), (library, 'version', lambda: (0, 9, 1)),
      (cusparselt_search, '_compile', compiled), (cusparselt_search, '_compressed', lambda a: (a, [0.25, 0.75, 0.5])),
      (_compat, 'device_times_ms', lambda f, args, iterations: [f.ms] * iterations),
    ):
      patch = mock.patch.object(target, name, value)
      patch.start()
      self.addCleanup(patch.stop)

  def test_the_fastest_go_on_and_the_others_stay_on_record(self):
    found = cusparselt_search.search(_PROBLEM, self.a, self.b, sparse=self.a, keep=3)
    settings = [(c.config['algorithm'], c.config['split_k'], c.config['split_k_mode']) for c in found.candidates]
    self.assertEqual(settings[0], (3, 2, 1))
    self.assertLen(settings, 3)
    self.assertEqual({c.setup_ms for c in found.candidates}, {0.5})
    self.assertEqual({tuple(c.config['version']) for c in found.candidates}, {(0, 9, 1)})
    asked = 6 + 2 * len(cusparselt_search._SPLITS)
    self.assertLen(found.others, asked - 3)
    self.assertTrue(all(row['rejected'] for row in found.others))
    reasons = [row['rejected'] for row in found.others if 'samples_ms' not in row]
    self.assertLen([r for r in reasons if r == 'refused: split_k refused'], 4)
    self.assertLen([r for r in reasons if r == 'fails: status 7'], 1)
    for row in found.others:
      if 'samples_ms' in row:
        self.assertLen(row['samples_ms'], cusparselt_search._SCREEN_ITERATIONS)

  def test_the_baseline_is_the_fastest_that_is_right_and_repeats(self):
    best, compress = cusparselt_search.fastest(_PROBLEM, self.a, self.b, self.b)
    self.assertEqual(best.config['algorithm'], 2)  # 3 is wrong and 1 changes from run to run
    self.assertEqual((best.setup_ms, compress), (0.0, [0.25, 0.75, 0.5]))

  def test_a_first_look_that_errs_does_not_choose_the_baseline(self):
    looked = [_WRONG, _UNSTABLE, 0, 2]
    found = cusparselt_search.Found(
      [
        _tuning.Candidate('cusparselt', {'algorithm': i}, _Algorithm(cusparselt.Config(algorithm=i)), (self.a, self.b))
        for i in looked
      ], [], [0.5],
    )  # fmt: skip
    with mock.patch.object(cusparselt_search, 'search', lambda *_: found):
      best, _ = cusparselt_search.fastest(_PROBLEM, self.a, self.b, self.b)
    self.assertEqual(best.config['algorithm'], 2)

  def test_a_known_algorithm_is_verified_again(self):
    for known, expected in ((0, 0), (_WRONG, 2)):
      best, _ = cusparselt_search.fastest(
        _PROBLEM, self.a, self.b, self.b, known=cusparselt.Config(algorithm=known)
      )
      self.assertEqual(best.config['algorithm'], expected)

  def test_nothing_right_is_said_with_reasons(self):
    with self.assertRaisesRegex(NotImplementedError, '(?s)no algorithm of cuSPARSELt is right.*relative error'):
      cusparselt_search.fastest(_PROBLEM, self.a, self.b, 5 * self.b)

  def test_a_tuner_that_gets_the_candidates_takes_none_that_is_wrong(self):
    found = cusparselt_search.search(_PROBLEM, self.a, self.b, keep=8)
    quiet = dict(rounds=1, iterations=2, gap_s=0.0)
    dense = _tuning.Candidate('dense', None, _Algorithm(cusparselt.Config(algorithm=0)), (self.a, self.b))
    entry = _tuning.tune(
      _PROBLEM.key, dense, found.candidates, self.b, _compat.device_times_ms, quick=quiet, final=quiet
    )
    self.assertEqual(entry['choice']['config']['algorithm'], 2)
    self.assertIn('relative error', entry['candidates'][0]['rejected'])


if __name__ == '__main__':
  absltest.main()
