"""Looking into what a layer runs: layers that are alike are traced once, before they are differentiated."""

from collections.abc import Iterator
import contextlib
import importlib
from unittest import mock


@contextlib.contextmanager
def traced_one_by_one() -> Iterator[None]:
  """Each call of `dot` and `ffn` is traced for itself, as often as it runs."""
  dot, ffn = (importlib.import_module(f'sparse24_jax.{name}') for name in ('dot', 'ffn'))
  with (
    mock.patch.object(dot, '_of_layers_alike', dot._sparse24_dot),
    mock.patch.object(ffn, '_of_blocks_alike', ffn._sparse24_ffn),
  ):
    yield
