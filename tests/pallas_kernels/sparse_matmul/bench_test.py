"""The tuner's way through a problem on a CPU: XLA in place of the kernels, a clock of our own in place of CUPTI."""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import pickle
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _power, _processes, _records, _tuning
from pallas_kernels.sparse_matmul import (
  _predict,
  _prepared,
  _settings,
  api,
  arg_specs,
  bench,
  cusparselt_search,
  mosaic_gpu,
  mosaic_gpu_sm80,
  reference,
  tune,
)
from tests import targets

_SPEC = arg_specs.Spec(64, 128, 192, 'forward')
_GPU = targets.target_device('sm_90a')
_A100 = targets.target_device('sm_80')


def _times(f, args, iterations):
  jax.block_until_ready(f(*args))
  return [1.0] * iterations


def _stand_in(wrong):
  """A matmul by XLA for the kernel with a setting, off by 2% for settings in `wrong`."""
  def sparse(p, config, *_):
    def f(a, b):
      d = api.sparse_matmul(
        a, b, b_layout=p.b_layout, out_layout=p.out_layout, out_dtype=jnp.float32, implementation='reference'
      )
      return (d * (1.02 if wrong(config) else 1.0)).astype(p.out_dtype)
    return f
  return sparse


class TuneTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(mock.patch.object(_prepared, 'times_ms', _times))
    self.enter_context(mock.patch.object(_prepared, 'gap_s', lambda p, iterations: 0.0))
    self.enter_context(mock.patch.object(_device, 'current', lambda: _GPU))
    self.enter_context(mock.patch.object(_device, 'environment', dict))

  def _entries(self):
    return json.loads((self.folder / _GPU.slug / 'sparse_matmul.json').read_text())['entries']

  def test_a_problem_of_two_roles_is_tuned_once_with_the_lock_held_where_the_gpu_is_used(self):
    held = []

    class Lock(contextlib.AbstractContextManager):

      def __enter__(self):
        held.append(True)

      def __exit__(self, *_):
        held.append(False)

    def sparse(p, config, *_):
      self.assertFalse(held and held[-1])
      return _stand_in(lambda c: c.slots == 2)(p, config)

    with mock.patch.object(_prepared, 'sparse', sparse):
      tune.tune([_SPEC, arg_specs.Spec(64, 192, 128, 'input_grad')], self.folder, ('sparse',), Lock())
    self.assertEqual(held, [True, False])
    (entry,) = self._entries()
    self.assertEqual(entry['key'], _prepared.problem(_SPEC).key)
    wrong = [row for row in entry['candidates'] if row['config']['slots'] == 2]
    self.assertNotEmpty(wrong)
    for row in entry['candidates']:
      self.assertEqual(row['rejected'] is not None, row in wrong)
      mosaic_gpu.Config(**row['config'])

  @parameterized.parameters(('forward', 'float8_e4m3fn'), ('weight_grad', 'float8_e5m2'))
  @pytest.mark.slow
  def test_in_8_bits_the_dense_matmul_of_16_bits_is_timed_and_never_chosen(self, role, dtype):
    spec = arg_specs.Spec(64, 128, 192, role, jnp.dtype(dtype))
    p = _prepared.problem(spec)
    self.assertEqual((p.b_dtype.name, p.b_layout, p.scalars), ('float8_e4m3fn', 'nk', 2))
    seen = []

    def times(f, args, iterations):
      seen.append(args[-1].dtype.name)
      # The dense matmul of 16 bits is the fastest, and kernels are faster than that of 8 bits.
      return [0.5 if args[-1].dtype == jnp.bfloat16 else 1.0 if isinstance(args[0], jax.Array) else 0.75] * iterations

    with (
      mock.patch.object(_prepared, 'sparse', _stand_in(lambda c: False)),
      mock.patch.object(_prepared, 'times_ms', times),
      mock.patch.object(_settings, 'to_time', lambda p, *_: _predict.candidates(p, 132, 2)),
    ):
      tune.tune([spec], self.folder, ('mosaic_gpu',))
    (entry,) = self._entries()
    self.assertEqual(entry['key'] | dict(dtype=dtype, b_layout='nk', out_dtype='bfloat16'), entry['key'])
    self.assertEqual(entry['choice']['implementation'], 'mosaic_gpu')
    self.assertEqual(set(entry['baseline']['samples_ms']), {1.0})
    self.assertEqual(list(entry['others']), ['dense_bf16'])
    self.assertEqual(entry['others']['dense_bf16']['samples_ms'], [0.5] * 4)
    self.assertEqual(set(seen), {'float8_e4m3fn', 'bfloat16'})
    found = _records.expected_ms(_GPU.slug, 'sparse_matmul', p.key, folder=self.folder)
    self.assertEqual(found, {'dense': 1.0, 'mosaic_gpu': 0.75, 'dense_bf16': 0.5})

  def test_what_is_known_takes_part_again(self):
    known = mosaic_gpu.Config(rows=64, bn=64, stages=3)
    p = _prepared.problem(_SPEC)
    row = dict(implementation='mosaic_gpu', config=_prepared.plain(known), error=0.0, rejected=None, samples_ms=[1.0])
    path = self.folder / _GPU.slug / 'sparse_matmul.json'
    _records.save(path, {'op': 'x'}, [dict(key=p.key, baseline={}, candidates=[row], choice=row)])
    own = _settings.own_kernel(p, _GPU)
    self.assertEqual(_settings.to_time(p, own, self.folder, False), [known])
    self.assertIn(known, _settings.to_time(p, own, self.folder, True))
    self.assertLen(_settings.to_time(p, own, self.folder, True), 11)

  @parameterized.parameters((True, 6, 3), (False, 2, None))
  def test_loops_judge_if_they_are_asked_to(self, sustained, finalists, loops_of):
    arguments = argparse.ArgumentParser()
    tune.arguments(arguments)
    arguments.add_argument('--tuned', type=pathlib.Path, default=self.folder)
    given = arguments.parse_args(['--select', 'small', *(['--sustained'] if sustained else [])])
    with mock.patch.object(_processes, 'run', return_value=_processes.Ended(failed=0, left=0)) as run:
      tune.run(given)
    job = run.call_args.args[0]
    with (
      mock.patch.object(_settings, 'compiled'), mock.patch.object(_settings, 'to_time'),
      mock.patch.object(_prepared, 'prepare', return_value=mock.MagicMock(sparse=[])),
      mock.patch.object(_prepared, 'weights', return_value=3), mock.patch.object(_tuning, 'tune') as judge,
      mock.patch.object(tune, '_cusparselt_search', return_value=mock.MagicMock(candidates=[], others=[])),
      mock.patch.object(_records, 'save'), mock.patch.object(_records, 'merged'),
      mock.patch.object(tune, '_print_tuned'),
    ):  # fmt: skip
      job(0, contextlib.nullcontext())
    options = judge.call_args.kwargs
    self.assertEqual((options['finalists'], options['loops_of']), (finalists, loops_of))

  def test_problems_without_time_are_told(self):
    out = self.enter_context(contextlib.redirect_stdout(io.StringIO()))
    with mock.patch.object(_processes, 'run', return_value=_processes.Ended(failed=1, left=3)) as run:
      self.assertEqual(tune.tune_in_processes(('small', 'small'), self.folder, (), 2, 5.0), 1)
    self.assertEqual(out.getvalue(), '3 problems not tuned: time ran out\n')
    job, count, *rest = run.call_args.args
    self.assertEqual((count, rest), (len(list(_prepared.unique(arg_specs.SMALL))), [2, 5.0]))
    with mock.patch.object(tune, 'tune') as called:
      job(count - 1, None)
    (((spec,), *given), _) = called.call_args
    self.assertEqual(given, [self.folder, (), None, False])
    self.assertEqual(_prepared.problem(spec), list(_prepared.unique(arg_specs.SMALL))[-1][0])

  def test_only_what_has_no_record_of_this_gpu(self):
    *known, last = [_prepared.problem(specs[0]) for _, specs in tune._selected(['square', 'fp8'])]
    path = self.folder / _GPU.slug / 'sparse_matmul.json'
    choice = dict(implementation='dense', config=None)
    _records.save(path, {'op': 'x'}, [dict(key=p.key, baseline={}, candidates=[], choice=choice) for p in known])
    with mock.patch.object(_processes, 'run', return_value=_processes.Ended(0, 0)) as run:
      tune.tune_in_processes(('square', 'fp8'), self.folder, ('mosaic_gpu',), 2, 5.0, missing=True)
    job, count, *_ = run.call_args.args
    self.assertEqual(count, 1)
    with mock.patch.object(tune, 'tune') as called:
      pickle.loads(pickle.dumps(job)).func(*job.args, 0, None)
    (((spec,), *_), _) = called.call_args
    self.assertEqual(_prepared.problem(spec), last)

  @parameterized.parameters(('library', 1.0, False), ('library', 1.5, False), ('own', 1.0, True), ('own', 1.5, False))
  def test_bench_runs_what_the_library_runs(self, folder, factor, takes_own):
    measured = _prepared.problem(_SPEC)
    own, chosen = mosaic_gpu.Config(rows=64, bn=64), mosaic_gpu.Config(rows=64, bn=64, stages=3)
    row = dict(implementation='mosaic_gpu', config=_prepared.plain(own), error=0.0, rejected=None, samples_ms=[1.0])
    path = self.folder / _GPU.slug / 'sparse_matmul.json'
    _records.save(path, {'op': 'x'}, [dict(key=measured.key, baseline={}, candidates=[row], choice=row)])
    p = dataclasses.replace(measured, m=int(measured.m * factor))
    compiled = mock.Mock(side_effect=InterruptedError)
    with (
      mock.patch.object(mosaic_gpu, 'chosen_config', return_value=chosen) as choose,
      mock.patch.object(_prepared, 'unique', lambda _: [(p, [])]),
      mock.patch.object(_prepared, 'compile_sparse', compiled),
      self.assertRaises(InterruptedError),
    ):
      bench.bench('small', self.folder / 'out.jsonl', _records.TUNED if folder == 'library' else self.folder)
    self.assertEqual(compiled.call_args.args[:2], (p, [own if takes_own else chosen]))
    self.assertEqual(choose.call_args_list, [] if takes_own else [mock.call(p, _GPU)])

  def test_a_record_has_clock_power_and_energy_of_the_loops_of_each(self):
    watts, timed = iter((600.0, 500.0, 505.0, 640.0, 520.0, 525.0)), []

    @contextlib.contextmanager
    def recorded():
      sample = _power.Sample(0.0, 1400.0, next(watts), ('power',))
      yield lambda: _power.Reading((sample,))

    def interleave(runs, *_, **__):
      timed.extend(runs)
      return [[1.0] for _ in runs]

    loops = iter((1.0, 2.0, 3.0, 1.2, 2.2, 3.2))
    with (
      mock.patch.object(_prepared, 'sparse', _stand_in(lambda c: False)),
      mock.patch.object(mosaic_gpu, 'chosen_config', lambda *_: mosaic_gpu.Config(rows=64, bn=64)),
      mock.patch.object(bench, 'cusparselt_baseline', lambda *_: None),
      mock.patch.object(_prepared, 'unique', lambda _: [(_prepared.problem(_SPEC), [_SPEC])]),
      mock.patch.object(_tuning, 'interleave', interleave),
      mock.patch.object(_tuning, 'sustained_ms', lambda *_, **__: next(loops)),
      mock.patch.object(_power, 'recorded', recorded),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      bench.bench('small', self.folder / 'out.jsonl')
    record = json.loads((self.folder / 'out.jsonl').read_text())
    # In turns: sparse, dense, dense, sparse, dense, dense.
    dense, full = (record['baselines'][name] for name in ('dense', 'dense_without_zeros'))
    for row, ms, power in ((record, [1.0, 1.2], 620.0), (dense, [2.0, 2.2], 510.0), (full, [3.0, 3.2], 515.0)):
      self.assertEqual(row['sustained_samples_ms'], ms)
      self.assertEqual((row['clock_mhz'], row['power_w'], row['held_back']), (1400.0, power, {'power': 1.0}))
      self.assertAlmostEqual(row['joule'], power * row['sustained_ms'] / 1e3)
    self.assertEqual([float(jnp.mean(run.args[0] == 0)) for run in timed[-2:]], [0.5, 0.0])

  @parameterized.product(
    dtype=('bfloat16', 'float8_e4m3fn'), role=arg_specs.ROLES,
  )
  @pytest.mark.few(2)
  def test_the_right_answer(self, dtype, role):
    spec = arg_specs.Spec(48, 64, 80, role, jnp.dtype(dtype))
    p = _prepared.problem(spec)
    x = _prepared.inputs(p, jax.random.key(0))
    a, b = (np.asarray(v, np.float64) for v in (x.a_dense, x.b))
    d = a @ (b.T if p.b_layout == 'nk' else b)
    expected = d if p.out_layout == 'mn' else d.T
    np.testing.assert_allclose(jax.jit(functools.partial(_prepared.expected, p))(x.a_dense, x.b), expected, atol=1e-4)


class WithoutWgmmaTest(parameterized.TestCase):
  """Acts as an A100: XLA stands in for mma.sp and cuSPARSELt."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.path = self.folder / _A100.slug / 'sparse_matmul.json'
    self.enter_context(mock.patch.object(_prepared, 'gap_s', lambda p, iterations: 0.0))
    self.enter_context(mock.patch.object(_device, 'current', lambda: _A100))
    self.enter_context(mock.patch.object(_device, 'environment', dict))
    self.enter_context(mock.patch.object(_records, 'paths_of', lambda *_: (self.path,)))
    self.enter_context(mock.patch.object(time, 'sleep'))

  def _run(self, f, *args, factor=1.0, kernel_ms=0.5, vendor_ms=None, setup_ms=0.0):
    """`f`, the results of mma.sp being `factor` times what they should; dense matmuls take 1 ms. What is printed."""

    def sparse_matmul(a, b, *, vectors, call, config, device):
      self.assertEqual(config, mosaic_gpu_sm80.Config())
      self.assertEqual(device, _A100)
      return factor * reference.sparse_matmul(a, b, vectors, call)

    def times(f, args, iterations):
      jax.block_until_ready(f(*args))
      # Of dense matmuls and of what stands for cuSPARSELt's, A is a matrix.
      mine = not isinstance(args[0], jax.Array)
      return [kernel_ms if mine else vendor_ms if f in vendors else 1.0] * iterations

    vendors = []

    def search(p, a_dense, b, *, sparse):
      vendors.append(jax.jit(_prepared._dense_ways(p)['plain']))
      candidate = _tuning.Candidate('cusparselt', {'algorithm': 3}, vendors[0], (a_dense, b), setup_ms)
      return cusparselt_search.Found([candidate] if vendor_ms else [], [], [])

    with (
      mock.patch.object(mosaic_gpu_sm80, 'sparse_matmul', sparse_matmul),
      mock.patch.object(cusparselt_search, 'search', search),
      mock.patch.object(bench, 'cusparselt_baseline', lambda *_: None),
      mock.patch.object(_tuning, 'sustained_ms', lambda *_, **__: 1.0),
      mock.patch.object(_prepared, 'times_ms', times),
      contextlib.redirect_stdout(io.StringIO()) as out,
    ):
      f(*args)
    return out.getvalue()

  def _candidates(self):
    p = _prepared.problem(_SPEC)
    return api.candidates_for(
      p.m, p.n, p.k, dtype=p.a_dtype, out_dtype=p.out_dtype, b_layout=p.b_layout, out_layout=p.out_layout
    )

  @parameterized.parameters(
    (dict(), ('mosaic_gpu_sm80', 'dense'), '   1.0000    0.5000   2.00  mosaic_gpu_sm80'),
    (dict(kernel_ms=1.5), ('dense',), '   1.0000    1.5000   0.67  dense'),
    (dict(vendor_ms=0.25, setup_ms=0.5), ('mosaic_gpu_sm80', 'dense'), '   1.0000    0.5000   2.00  mosaic_gpu_sm80'),
    (dict(factor=1.02, vendor_ms=0.75), ('cusparselt', 'dense'), '   1.0000    0.7500   1.33  cusparselt'),
  )
  def test_the_fastest_verified_back_end_is_recorded_chosen_and_printed(self, circumstance, candidates, row):
    self.assertEqual(self._candidates(), ('dense',))
    self._run(tune.tune, [_SPEC], self.folder, **circumstance)
    (entry,) = json.loads(self.path.read_text())['entries']
    kernel = entry['candidates'][0]
    self.assertEqual(kernel['implementation'], 'mosaic_gpu_sm80')
    self.assertEqual(mosaic_gpu_sm80.Config(**kernel['config']), mosaic_gpu_sm80.Config())
    self.assertEqual(kernel['rejected'] is None, 'factor' not in circumstance)
    self.assertEqual(self._candidates(), candidates)
    *_, last = bench.table_of_records(self.folder)
    self.assertEndsWith(last, row)

  def test_bench_measures_the_kernel_of_the_gpu_and_passes_over_what_that_does_not_take(self):
    eight_bits = dataclasses.replace(_SPEC, dtype=jnp.dtype('float8_e4m3fn'))
    out = self.folder / 'out.jsonl'
    with mock.patch.dict(arg_specs.SELECTIONS, small=[_SPEC]):
      printed = self._run(bench.bench, 'small', out)
    (record,) = map(json.loads, out.read_text().splitlines())
    self.assertEqual((record['implementation'], record['median_ms']), ('mosaic_gpu_sm80', 0.5))
    self.assertEqual(record['config'], dataclasses.asdict(mosaic_gpu_sm80.Config()))
    self.assertEqual(record['baselines']['dense']['median_ms'], 1.0)
    self.assertIn('x2.000', printed)
    printed = self.enter_context(contextlib.redirect_stdout(io.StringIO()))
    with mock.patch.dict(arg_specs.SELECTIONS, small=[eight_bits]):
      bench.bench('small', out)
    self.assertIn("'dtype': 'float8_e4m3fn'", printed.getvalue())
    self.assertIn(f'not measured, no kernel of this package takes it on {_A100.name}', printed.getvalue())
    self.assertLen(out.read_text().splitlines(), 1)


if __name__ == '__main__':
  absltest.main()
