"""Sampling beside a block, from an `nvidia-smi` and an NVML of our own making."""

import os
import pathlib
import sys
import tempfile
import time
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax

from pallas_kernels import _device, _power
from tests import targets

_ENDLESS = 'while true; do echo "$(cat clock), 690.5, 0x0000000000000024"; sleep 0.01; done'


class PowerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(mock.patch.dict(sys.modules, {'pynvml': None}))
    self.enter_context(mock.patch.object(_power, '_PATIENCE_S', 60.0))
    self.enter_context(mock.patch.dict(os.environ, {'PATH': f'{self.folder}:{os.environ["PATH"]}'}))
    self.enter_context(mock.patch.dict(os.environ, {'CUDA_VISIBLE_DEVICES': ''}))

  def _install(self, body):
    script = self.folder / 'nvidia-smi'
    script.write_text(f'#!/bin/sh\ncd {self.folder}\necho "$@" > arguments\necho $$ > pid\n{body}\n')
    script.chmod(0o755)

  def test_samples_are_those_of_the_block_and_the_program_ends_with_it(self):
    clock = self.folder / 'clock'
    clock.write_text('1980')
    self._install(_ENDLESS)
    with _power.recorded('0', every_s=0.01) as reading:
      time.sleep(0.3)
      clock.write_text('1400')
      start = time.perf_counter()
      time.sleep(0.5)
    clock.write_text('210')
    found = reading()
    count = len(found.samples)
    self.assertGreater(count, 5)
    self.assertEqual((found.samples[0].clock_mhz, found.samples[-1].clock_mhz), (1980.0, 1400.0))
    self.assertGreater(found.samples[-1].seconds, start)
    self.assertEqual({s.power_w for s in found.samples}, {690.5})
    self.assertEqual({s.reasons for s in found.samples}, {('power', 'heat')})
    with self.assertRaises(ProcessLookupError):
      os.kill(int((self.folder / 'pid').read_text()), 0)
    self.assertLen(reading().samples, count)
    arguments = (self.folder / 'arguments').read_text().split()
    self.assertContainsSubset(['--id=0', '--format=csv,noheader,nounits', '--loop-ms=10'], arguments)

  def test_the_fields_of_a_record(self):
    samples = [
      _power.Sample(0.0, 1300.0, 680.0, ('power',)), _power.Sample(0.1, 1900.0, 700.0),
      _power.Sample(0.2, 1400.0, 500.0, ('power', 'heat')), _power.Sample(0.3, 1390.0, 690.0, ('power',)),
    ]
    found = _power.Reading(tuple(samples)).fields(2.0)
    self.assertEqual(found, dict(clock_mhz=1395.0, power_w=685.0, joule=1.37, held_back=dict(power=0.75, heat=0.25)))
    unknown = _power.Reading().fields(2.0)
    self.assertEqual(unknown, dict(clock_mhz=None, power_w=None, joule=None, held_back=None))

  @parameterized.named_parameters(
    ('older', 'echo \'Field "power.draw.instant" is not a valid field to query.\'; exit 2'),
    ('untold', 'echo "1980, [N/A], 0x0"; exit 0'),
    ('no_driver', 'echo "NVIDIA-SMI has failed, because, well"; exit 9'),
    ('absent', None),
  )
  def test_where_nothing_is_known_the_block_runs(self, body):
    if body is None:
      os.environ['PATH'] = str(self.folder)
    else:
      self._install(body)
    with _power.recorded('0') as reading:
      ran = True
    self.assertTrue(ran)
    self.assertEqual(reading(), _power.Reading())

  def test_an_error_of_the_block_ends_the_program(self):
    (self.folder / 'clock').write_text('1980')
    self._install(_ENDLESS)
    with self.assertRaises(InterruptedError), _power.recorded('0', every_s=0.01):
      raise InterruptedError
    with self.assertRaises(ProcessLookupError):
      os.kill(int((self.folder / 'pid').read_text()), 0)

  @parameterized.parameters(('', '1'), ('3,5', '5'), ('GPU-a,GPU-b', 'GPU-b'))
  def test_the_gpu_that_jax_computes_on(self, visible, expected):
    self.assertIsNone(_device.listed())
    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')),
      mock.patch.object(jax, 'devices', lambda: [mock.Mock(local_hardware_id=1)]),
      mock.patch.dict(os.environ, {'CUDA_VISIBLE_DEVICES': visible}),
    ):
      self.assertEqual(_device.listed(), expected)
      with mock.patch.object(_device, '_output', side_effect=lambda *command: ' '.join(command)) as asked:
        _device._which_gpu()
      self.assertEqual(asked.call_args.args[:3], ('nvidia-smi', '-i', expected))

  @parameterized.parameters((0, 0, [612.0]), (3, 0, [690.5]), (0, 999, [690.5]))
  def test_nvml_goes_first_and_nvidia_smi_answers_for_what_it_refuses(self, refused, raised, expected):
    (self.folder / 'clock').write_text('1980')
    self._install(_ENDLESS)

    class NVMLError(Exception):
      pass

    def start():
      if raised:
        raise NVMLError(raised)

    power = types.SimpleNamespace(nvmlReturn=refused, value=types.SimpleNamespace(uiVal=612_000))
    nvml = mock.Mock(
      nvmlInit=start, nvmlDeviceGetHandleByIndex=lambda i: f'GPU {i}', NVML_FI_DEV_POWER_INSTANT=186, NVML_CLOCK_SM=1,
      nvmlDeviceGetFieldValues=lambda gpu, ids: [power] if (gpu, ids) == ('GPU 2', [186]) else [],
      nvmlDeviceGetClockInfo=lambda gpu, kind: {('GPU 2', 1): 1245}[gpu, kind],
      nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x4 if gpu == 'GPU 2' else 0x1,
    )  # fmt: skip
    with mock.patch.dict(sys.modules, {'pynvml': nvml}), _power.recorded('2', every_s=0.01) as reading:
      time.sleep(0.1)
    self.assertEqual(sorted({s.power_w for s in reading().samples}), expected)
    if expected == [612.0]:
      self.assertEqual(reading().samples[0], _power.Sample(mock.ANY, 1245, 612.0, ('power',)))


if __name__ == '__main__':
  absltest.main()
