"""A GPU without sparse wgmma: its own records choose, and what they choose multiplies right."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _checks, _device, _disk_cache, _dispatch, _passes_check, _records, costs
from pallas_kernels.ffi import cusparselt
from pallas_kernels.pack import api as pack
from pallas_kernels.sparse_matmul import api, check, reference
import sparse24_jax as s24
from sparse24_jax.block_gain import explain
from sparse24_jax.layer_plan import Backends
from sparse24_jax.plan import may_pack, plan_layer
from sparse24_jax.precision import NATIVE, ROLES
from sparse24_jax.where_it_pays import table
from tests import oracles, targets
from tests.sparse24_jax.dot_test import normal, TOLERANCE, written_formulas
from tests.sparse24_jax.gpus import gpu

A100, L40S = targets.target_device('sm_80'), targets.target_device('sm_89')
FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
FP8 = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', precision='fp8')
TOKENS, D_IN, D_OUT = 64, 128, 192
# Of forward, input gradient and weight gradient.
CHOICES = (
  ('mosaic_gpu_sm80', 'mosaic_gpu_sm80', 'mosaic_gpu_sm80'),
  ('mosaic_gpu_sm80', 'cusparselt', 'dense'),
  ('dense', 'dense', 'cusparselt'),
)
ran = []


def mma(*args, call):
  ran.append(('mosaic_gpu_sm80', call.b_layout, call.out_layout))
  return reference.sparse_matmul(*args, call)


def vendor(*args, call):
  ran.append(('cusparselt', call.b_layout, call.out_layout))
  return reference.sparse_matmul(*args, call)


def entry(role, choice):
  """A record in which `choice` took 1 ms and all else twice as long."""
  key = NATIVE.key(role, TOKENS, D_IN, D_OUT, 'bfloat16')
  times = {name: 1.0 if name == choice else 2.0 for name in ('dense', 'mosaic_gpu_sm80', 'cusparselt')}
  baseline = dict(implementation='dense', config=None, samples_ms=[times.pop('dense')])
  rows = [dict(implementation=name, config={}, rejected=None, samples_ms=[ms]) for name, ms in times.items()]
  return dict(key=key, baseline=baseline, candidates=rows, choice=dict(implementation=choice, config={}))


@contextlib.contextmanager
def recorded(choices=None, device=A100):
  """A machine with this GPU and records of the three matmuls, with XLA for what only a GPU runs."""
  with tempfile.TemporaryDirectory() as name:
    path = pathlib.Path(name) / device.slug / 'sparse_matmul.json'
    if choices is not None:
      _records.save(path, {'op': api.OP}, [entry(*pair) for pair in zip(ROLES, choices, strict=True)])
    ran.clear()
    _dispatch.log_once.cache_clear()
    with (
      gpu(device),
      mock.patch.object(_records, 'paths_of', lambda *_: (path,)),
      mock.patch.object(costs, 'expected_ms', lambda *_: 0.5),
      mock.patch.object(cusparselt, 'register'),
      mock.patch.object(pack, 'candidates', lambda *_: ['reference']),
      mock.patch.dict(api.BACKENDS, mosaic_gpu_sm80=f'{__name__}:mma', cusparselt=f'{__name__}:vendor'),
    ):
      yield


def backend(choice):
  return None if choice == 'dense' else choice


class ChoiceTest(parameterized.TestCase):

  @parameterized.product(choices=CHOICES, dtype=('bfloat16', 'float16'), device=(A100, L40S))
  def test_matmuls_follow_the_records_of_the_gpu(self, choices, dtype, device):
    w = {'w': {'kernel': jax.ShapeDtypeStruct((D_IN, D_OUT), 'float32')}}
    recipe = s24.Recipe('r', (s24.Rule('.*', FST),))
    with recorded(choices, device):
      found = plan_layer(FST, TOKENS, D_IN, D_OUT, jnp.dtype(dtype))
      self.assertEqual(found.backends, Backends(*map(backend, choices)))
      self.assertTrue(may_pack(FST, jnp.zeros((D_IN, D_OUT))))
      self.assertEqual(plan_layer(FST, 16 * TOKENS, D_IN, D_OUT, jnp.dtype(dtype)).backends, Backends())
      (here,) = s24.where_it_pays(w, recipe, tokens=TOKENS, dtype=dtype)
    with recorded(choices, device), mock.patch.object(_device, 'current', lambda: _device.Device('cpu', 'cpu')):
      (elsewhere,) = s24.where_it_pays(w, recipe, tokens=TOKENS, dtype=dtype, device=device.slug)
    for layer in (here, elsewhere):
      self.assertEqual(tuple(role.chosen for role in layer.roles), choices)
      # What XLA takes to draw a sample was not measured.
      self.assertEqual(layer.roles[2].packing_ms, None if choices[2] == 'dense' else 0.5)
      self.assertEqual(layer.gain is None, choices[2] == 'dense')

  @parameterized.parameters(
    (None, '`python -m pallas_kernels tune sparse_matmul`'),
    (('dense',) * 3, 'no sparse matmul of 16 bits measured faster')
  )
  def test_dense_and_said_why_without_one_that_won(self, choices, reason):
    with recorded(choices), self.assertLogs('sparse24_jax', logging.INFO) as logs:
      for _ in range(2):
        self.assertEqual(plan_layer(FST, TOKENS, D_IN, D_OUT, jnp.bfloat16).backends, Backends())
        self.assertFalse(may_pack(FST, jnp.zeros((D_IN, D_OUT))))
    self.assertLen(logs.output, 1)
    self.assertIn(f'no kernels on {A100.name}: ', logs.output[0])
    self.assertIn(reason, logs.output[0])

  def test_fp8_is_simulated(self):
    w = {'w': {'kernel': jax.ShapeDtypeStruct((D_IN, D_OUT), 'float32')}}
    with recorded(CHOICES[0], L40S):
      self.assertEqual(plan_layer(FP8, TOKENS, D_IN, D_OUT, jnp.bfloat16).backends, Backends())
      self.assertFalse(may_pack(FP8, jnp.zeros((D_IN, D_OUT))))
      (layer,) = s24.where_it_pays(w, s24.Recipe('r', (s24.Rule('.*', FP8),)), tokens=TOKENS)
    self.assertEqual({role.chosen for role in layer.roles}, {'simulated'})
    self.assertRegex(layer.simulated, f'{L40S.slug} has no FP8 kernels, .*one Hopper GPU')


class CheckedTest(absltest.TestCase):
  """An Ampere GPU without records: each matmul goes where a check of it says."""

  def test_plan_prices_and_sources(self):
    ms = dict(zip(((D_OUT, TOKENS), (D_IN, TOKENS), (D_OUT, D_IN)), (0.5, 0.8, 1.25), strict=True))

    def checked(p, device, settings):
      row = dict(implementation='mosaic_gpu_sm80', config=None, rejected=None, final_samples_ms=[ms[p.m, p.n]])
      row['samples_ms'] = row['final_samples_ms']
      won = ms[p.m, p.n] < 1
      choice = dict(implementation='mosaic_gpu_sm80' if won else 'dense', config=None)
      return dict(key=p.key, baseline=dict(samples_ms=[1.0]), candidates=[row], choice=choice)

    packers = True
    with (
      recorded(),
      mock.patch.object(_checks, '_is_here', lambda device: device == A100),
      mock.patch.dict(_checks._made, clear=True),
      mock.patch.dict(os.environ, {_disk_cache.VARIABLE: 'off'}),
      mock.patch.object(check, 'LEAST_MULTIPLICATIONS', 1),
      mock.patch.object(check, '_entry', checked),
      mock.patch.object(_passes_check, 'right', lambda device: packers),
    ):
      w = {'kernel': jax.ShapeDtypeStruct((D_IN, D_OUT), 'float32')}
      exact = s24.Recipe('r', (s24.Rule('.*', dataclasses.replace(FST, weight_grad='dense')),))
      first = s24.where_it_pays(w, exact, tokens=TOKENS)
      self.assertTrue(may_pack(FST, jnp.zeros((D_IN, D_OUT))))
      found = plan_layer(FST, TOKENS, D_IN, D_OUT, jnp.bfloat16)
      self.assertEqual(found.backends, Backends('mosaic_gpu_sm80', 'mosaic_gpu_sm80', None))
      self.assertEqual(plan_layer(FP8, TOKENS, D_IN, D_OUT, jnp.bfloat16).backends, Backends())
      recipe = s24.Recipe('r', (s24.Rule('.*', FST),))
      layers = s24.where_it_pays(w, recipe, tokens=TOKENS)
      self.assertEqual(s24.where_it_pays(w, exact, tokens=TOKENS), first)  # not by what was checked meanwhile
      block = s24.block_gain(D_IN, D_OUT, recipe, tokens=TOKENS)
      packers = False
      self.assertEqual(plan_layer(FST, TOKENS, D_IN, D_OUT, jnp.bfloat16).backends, Backends())
    self.assertEqual([role.checked for role in layers[0].roles], [2.0, 1.25, 0.8])
    self.assertEqual([role.matmul_ms for role in layers[0].roles], [0.5, 0.8, 1.0])
    note = 'no record, checked here: forward 2.00 times dense, input_grad 1.25 times dense, weight_grad 0.80 times'
    self.assertIn(note, table(layers))
    self.assertIn('checked here: 2.00 times dense', explain(block))


class MatmulTest(parameterized.TestCase):

  @parameterized.parameters((CHOICES[0], jnp.float16), (CHOICES[1], jnp.bfloat16))
  @pytest.mark.few
  def test_three_matmuls(self, choices, dtype):
    x, w, dz = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(
      ((TOKENS, D_IN), (D_IN, D_OUT), (TOKENS, D_OUT))
    ))  # fmt: skip
    state, key = FST.projection.init(w), jax.random.key(3)
    with recorded(choices):
      @jax.jit
      def f(x, w, state, dz, key):
        z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=FST, key=key), x, w)
        return z, *vjp(dz)

      found = f(x, w, state, dz, key)
      layouts = (('nk', 'nm'), ('nk', 'nm'), ('kn', 'nm'))
      expected_calls = [(c, *layout) for c, layout in zip(choices, layouts, strict=True) if c != 'dense']
      self.assertEqual(set(ran), set(expected_calls))
    for got, right in zip(found, written_formulas(FST, x, w, state, dz, key), strict=True):
      self.assertLess(np.linalg.norm(oracles.wide(got) - right) / np.linalg.norm(right), TOLERANCE[dtype])


if __name__ == '__main__':
  absltest.main()
