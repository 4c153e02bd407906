"""GPUs that are not there."""

import contextlib
from unittest import mock

from pallas_kernels import _device, _triton
from tests import targets

H100 = targets.target_device('sm_90a')


@contextlib.contextmanager
def gpu(device=H100, *, whole=True, triton=None):
  """A machine with this GPU and jax-triton; the simulated devices of the tests do not count."""
  with (
    mock.patch.object(_device, 'current', lambda: device),
    mock.patch.object(_device, 'arrays_are_whole', lambda: whole),
    mock.patch.object(_triton, 'why_absent', lambda: triton),
  ):
    yield
