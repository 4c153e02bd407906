"""Races: the order of windows, the clock, and the program over a folder of tokens."""

import collections
import contextlib
import io
import json
from pathlib import Path
import tempfile
import threading
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments.bench import step_cases
from experiments.runs.data import packing
from experiments.runs.data.tokenizer import Bytes
from experiments.runs.race import contenders, trials
from experiments.runs.race import main as program
from experiments.runs.race.search import Trial
from tests.experiments.fakes import TEXT


class OrderTest(absltest.TestCase):
  def test_every_window_once_before_any_again(self):
    found = trials.order(3, 25, 10, 16)
    self.assertCountEqual(found[:10], 16 * np.arange(10))
    self.assertCountEqual(found[10:20], 16 * np.arange(10))
    self.assertFalse(np.array_equal(found, trials.order(4, 25, 10, 16)))


class ClockTest(absltest.TestCase):
  def test_steps_are_timed_on_a_gpu_that_is_warm(self):
    made = mock.Mock(batch=1, length=1, phases=(('sparse', 0.5), ('dense', 0.5)))
    now = [0.0]

    def step(state, *_):
      now[0] += 1.0 if now[0] < 20 else 2.0  # it is fast until it is hot
      return state, 0

    made.step.return_value = step
    with mock.patch.object(trials.time, 'perf_counter', lambda: now[0]):
      self.assertEqual(trials.clock(made, None, search_every=5, bursts=2)['phases_ms'], {'sparse': 1000, 'dense': 2000})
      now[0] = 0.0
      found = trials.clock(made, None, search_every=5, bursts=2, warm_s=25)
    self.assertEqual(found['bursts_ms'], {'sparse': [2000, 2000], 'dense': [2000, 2000]})
    self.assertEqual(found['step_ms'], 2000)

  def test_phases_of_one_name_are_timed_once_and_count_with_their_shares(self):
    made = mock.Mock(batch=1, length=1, phases=(('dense', 0.025), ('sparse', 0.925), ('dense', 0.05)))
    now = [0.0]

    def step_of(phase, step):
      def run(state, *_):
        now[0] += {'dense': 2.0, 'sparse': 1.0}[phase]
        return state, 0

      return run

    made.step = step_of
    with mock.patch.object(trials.time, 'perf_counter', lambda: now[0]):
      found = trials.clock(made, None, search_every=5, bursts=2)
    self.assertEqual(found['phases_ms'], {'dense': 2000, 'sparse': 1000})
    self.assertAlmostEqual(found['step_ms'], 0.925 * 1000 + 0.075 * 2000)

  def test_the_first_runs_of_a_program_do_not_count(self):
    made = mock.Mock(batch=1, length=1, phases=(('sparse', 0.5), ('dense', 0.5)))
    now, runs = [0.0], collections.Counter()

    def step_of(phase, step):
      program = phase, step % 5 == 4  # with a search or without

      def run(state, *_):
        runs[program] += 1
        now[0] += 1.0 if runs[program] > 2 else 10.0
        return state, 0

      return run

    made.step = step_of
    with mock.patch.object(trials.time, 'perf_counter', lambda: now[0]):
      found = trials.clock(made, None, search_every=5, bursts=2)
    self.assertEqual(found['bursts_ms'], {'sparse': [1000, 1000], 'dense': [1000, 1000]})


def _prepared(test):
  """A folder with prepared tokens in it."""
  folder = Path(test.enter_context(tempfile.TemporaryDirectory()))
  packing.write(folder / 'tokens', {'train': [TEXT] * 4, 'validation': [TEXT]}, Bytes())
  return folder


class ProgramTest(parameterized.TestCase):
  def test_trials_whose_dense_end_was_in_16_bits_do_not_count(self):
    """Records of before lack the field; those of other contenders do not need it."""
    folder = _prepared(self)
    out = folder / 'race.jsonl'
    argv = f'--out {out} --text {folder / "tokens"} --tiny --batch 4 --steps 25 --contenders fst fst_fp8_all'.split()
    options = program.parser().parse_args(argv)
    trial = dict(rate=0.02, decay=0.0, seed=0, share=1.0, loss=1.0)
    for dense_phase, counted in ((None, 0), ('fp8', 1)):
      records = [
        {'bench': 'race', **program.Race(options).same, 'contender': name, **trial, 'dense_phase': phase}
        for name, phase in (('fst', None), ('fst_fp8_all', dense_phase))
      ]  # fmt: skip
      lines = [json.dumps({k: v for k, v in each.items() if v is not None or k != 'dense_phase'}) for each in records]
      out.write_text('\n'.join(lines) + '\n')
      done = program.Race(options).done
      self.assertEqual((len(done['fst']), len(done['fst_fp8_all'])), (1, counted))
      out.unlink()

  def test_trains_records_and_resumes(self):
    folder = _prepared(self)
    out = folder / 'race.jsonl'
    argv = (
      f'--out {out} --text {folder / "tokens"} --tiny --batch 4 --steps 25 --eval-batches 1'
      ' --rate 0.02 --trials 2 --seeds 1 --contenders dense'
    ).split()
    self.assertEqual(program.main(argv), 0)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    self.assertEqual([r['bench'] for r in records], ['race_clock'] + ['race'] * 3)
    runs = records[1:]
    self.assertEqual([(r['rate'], r['seed'], r['share']) for r in runs][:2], [(0.02, 0, 1.0), (0.01, 0, 1.0)])
    best = min(runs[:2], key=lambda r: r['loss'])['rate']
    repeats = [(r['rate'], r['seed'], r['share']) for r in runs[2:]]
    self.assertEqual(repeats, [(best, 1, 1.0)])  # and none of fewer seconds: there are none
    for run in runs:
      self.assertLess(run['loss'], 4.0)  # a tenth of bits above nothing learnt is 5.5
      step, seconds, loss = run['validation'][-1]
      self.assertEqual((step, loss), (25, run['loss']))
      self.assertAlmostEqual(seconds, 25e-3 * run['step_ms'], places=2)
      self.assertContainsSubset(('device', 'commit', 'command', 'text', 'parameters', 'wall_s', 'train'), run)
    program.main(argv)  # nothing is left but the clock
    self.assertLen(out.read_text().splitlines(), len(records) + 1)
    options = program.parser().parse_args(argv)
    self.assertLen(program.Race(options).done['dense'], 3)
    for name, other in (('text', 'x'), ('size', '124m'), ('style', 'rotary'), ('batch', 5), ('length', 17),
                        ('seconds', 0.002), ('held_out_tokens', 1), ('device', 'another'),
                        ('equal_steps', 26), ('xla_flags', '--none')):  # fmt: skip
      out.write_text(''.join(json.dumps({**r, name: other}) + '\n' for r in records))
      self.assertEmpty(program.Race(options).done['dense'], name)

  def test_searches_begin_as_told(self):
    folder = _prepared(self)
    argv = f'--out {folder / "r.jsonl"} --text {folder / "tokens"} --tiny --batch 4 --steps 25 --eval-batches 1'.split()
    argv += ['--rate', '0.02', '--contenders', 'dense', 'fst', 'sr_ste']
    for options, decay, of_weights in (([], contenders.DECAY, 0.3), (['--decay', '6e-5'], 6e-5, 6e-5)):
      race = program.Race(program.parser().parse_args([*argv, *options]))
      found = {name: race._next(name) for name in ('dense', 'fst', 'sr_ste')}
      wanted = {'dense': 0.0, 'fst': decay, 'sr_ste': of_weights}
      self.assertEqual(found, {name: Trial(0.02, of) for name, of in wanted.items()})

  def test_too_few_steps_are_refused_before_anything_compiles(self):
    folder = _prepared(self)
    argv = (
      f'--out {folder / "r.jsonl"} --text {folder / "tokens"} --tiny --batch 4 --steps 300 --eval-batches 1'
      ' --minutes 0 --contenders mst_half_dense'
    ).split()
    race = program.Race(program.parser().parse_args(argv))
    with mock.patch('builtins.print') as said:
      self.assertEqual(race.run(), 1)
    self.assertEmpty(race.to_trace)
    self.assertRegex(said.call_args.args[0], 'mst_half_dense: failed: ValueError: .* shorter than refresh_every=10')

  def test_no_contender_has_the_name_of_another_method_of_the_benchmarks(self):
    for name in step_cases.METHODS.keys() & contenders.CONTENDERS.keys():
      timed, raced = step_cases.METHODS[name], contenders.CONTENDERS[name]
      self.assertEqual((timed.label, timed.recipe), (raced.label, raced.recipe))

  def test_the_vocabulary_is_that_of_the_tokenizer(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    # The text has no token of a byte above 127, and the separator of the second is not its highest one.
    short = mock.Mock(wraps=Bytes(), vocab_size=256, separator=0, fingerprint='bytes')
    merged = mock.Mock(wraps=Bytes(), vocab_size=1000, separator=700, fingerprint='bpe')
    for name, tokenizer, vocab in (('bytes', short, 256), ('bpe', merged, 1000)):
      packing.write(folder / name, {'train': [TEXT], 'validation': [TEXT]}, tokenizer)
      argv = f'--out {folder / "r"} --text {folder / name} --tiny --eval-batches 1 --contenders dense'.split()
      options = program.parser().parse_args(argv)
      race = program.Race(options)
      highest = max(tokenizer.separator, *TEXT.encode())
      self.assertEqual((race.vocab, int(race.tokens.max())), (vocab, highest))
      meta = json.loads((folder / name / 'meta.json').read_text())
      (folder / name / 'meta.json').write_text(json.dumps(meta | {'vocab_size': highest}))
      with self.assertRaisesRegex(ValueError, f'{name}: its meta.json says .*, and token {highest} is among them'):
        program.Race(options)

  def test_losses_of_too_little_held_out_text_are_refused(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    packing.write(folder / 'tokens', {'train': [TEXT], 'validation': ['short']}, Bytes())
    argv = ['--out', str(folder / 'r'), '--text', str(folder / 'tokens'), '--tiny', '--contenders', 'dense']
    with self.assertRaisesRegex(ValueError, 'tokens holds out [0-9]+ tokens; an evaluation takes'):
      program.Race(program.parser().parse_args(argv))

  @parameterized.parameters('batch', 'steps', 'bursts', 'eval-batches', 'evaluations', 'seconds', 'rate')
  def test_what_is_counted_is_above_zero(self, name):
    with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
      program.parser().parse_args(['--out', 'r', '--text', 't', '--contenders', 'dense', f'--{name}', '0'])
    self.assertRegex(err.getvalue(), f'argument --{name}: 0 must be')

  def test_only_one_thread_touches_what_is_compiled(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    packing.write(folder / 'tokens', {'train': [TEXT], 'validation': [TEXT]}, Bytes())
    argv = f'--out {folder / "r"} --text {folder / "tokens"} --tiny --eval-batches 1 --contenders dense'.split()
    race, threads = program.Race(program.parser().parse_args([*argv, '--clock-only', 'half_ffn', 'fst'])), []

    class Watched(dict):
      def __setitem__(self, *item):
        threads.append(threading.current_thread())
        super().__setitem__(*item)

    race.programs = Watched()

    traced = []

    def lower(name):
      traced.append((name, threading.current_thread(), set(race.clocked)))
      if name == 'fst':
        raise ValueError('does not trace')

    def prepare(name):
      race.to_trace.append((name, mock.Mock(lower=lambda: lower(name))))

    def clocked(name):
      race.clocked[name] = {}

    with mock.patch.multiple(race, _prepare=prepare, _clock=clocked, _next=lambda name: None):
      self.assertEqual(race.run(), 1)
    self.assertEqual(race.failed, {'fst'})
    self.assertEqual(threads, [threading.main_thread()] * 2)
    # Kernels are checked while one is traced: each after the one before was timed, by the thread that trains.
    self.assertEqual([name for name, *_ in traced], ['dense', 'half_ffn', 'fst'])
    self.assertEqual({thread for _, thread, _ in traced}, {threading.main_thread()})
    self.assertEqual([len(timed) for *_, timed in traced], [0, 1, 2])

  def test_what_takes_a_larger_batch_is_said_before_anything_trains(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    packing.write(folder / 'tokens', {'train': [TEXT], 'validation': [TEXT]}, Bytes())
    argv = f'--out {folder / "r"} --text {folder / "tokens"} --tiny --batch 96 --eval-batches 1 --contenders'.split()
    with mock.patch.object(program.Race, '_trace_next') as traced, mock.patch('builtins.print') as said:
      race = program.Race(program.parser().parse_args([*argv, 'dense', 'neuron_level', '--minutes', '0']))
      self.assertEqual(race.run(), 1)
    self.assertEqual([name for name, _ in race.to_trace], ['dense'])
    traced.assert_called_once()
    self.assertRegex(said.call_args.args[0], 'neuron_level: failed: ValueError: --batch 96: .* as --batch 128')

  @pytest.mark.slow
  def test_sparse_activations_race(self):
    folder = _prepared(self)
    out = folder / 'race.jsonl'
    argv = (
      f'--out {out} --text {folder / "tokens"} --tiny --size 124m_short --batch 64 --steps 20 --eval-batches 1'
      ' --rate 0.02 --trials 1 --seeds --bursts 1 --contenders dense_relu2 neuron_level'
    ).split()
    self.assertEqual(program.main(argv), 0)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    clocked = {r['contender']: list(r['phases_ms']) for r in records if r['bench'] == 'race_clock'}
    self.assertEqual(clocked, {'dense_relu2': ['dense'], 'neuron_level': ['dense', 'sparse']})
    losses = [r['loss'] for r in records if r['bench'] == 'race']
    self.assertLen(set(losses), 2)
    self.assertLess(max(losses), 4.5)  # a tenth of bits above nothing learnt is 5.5

  def test_a_contender_that_fails_is_counted(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    packing.write(folder / 'tokens', {'train': [TEXT], 'validation': [TEXT]}, Bytes())
    argv = f'--out {folder / "r.jsonl"} --text {folder / "tokens"} --batch 4 --contenders dense --size 124m'.split()
    self.assertEqual(program.main([*argv, '--eval-batches', '1']), 1)  # cuDNN's attention, without a GPU


if __name__ == '__main__':
  absltest.main()
