"""Packers and activations by Triton against their references, once, on a GPU whose kernels are taken by checks.

A matmul's own check (`sparse_matmul/check.py`) says nothing of what makes its operands.
"""

from collections.abc import Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _checks, _device, _tuning
from pallas_kernels._passes import differing
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.pack import api as pack

# Tiles that are full, and some that are not.
_SHAPE = (516, 260)


def right(device: _device.Device) -> bool:
  """Whether the passes that training in 16 bits takes from Triton are right on this GPU."""
  entry = _checks.outcome(device, 'passes', dict(dtype='bfloat16'), _SHAPE, _entry)
  return entry is not None and not any(row['rejected'] for row in entry['candidates'])


def _entry() -> _checks.Entry:
  rows = [dict(implementation=name, config=None, rejected=reason) for name, reason in _reasons()]
  return dict(key=dict(dtype='bfloat16'), candidates=rows)


def _reasons() -> Iterator[tuple[str, str | None]]:
  """Names of passes, each with why it is wrong, or None."""
  key = jax.random.key(7)
  w, dh = (jax.random.normal(jax.random.fold_in(key, i), _SHAPE, jnp.bfloat16) for i in range(2))
  codes = _run('reference', pack.transposable_pack, dh).codes
  for name, (op, *args) in {
    'transposable_pack': (pack.transposable_pack, w), 'masked_pack': (pack.masked_pack, w, codes),
    'soft_threshold_pack': (pack.soft_threshold_pack, w, jnp.float32(1.5)), 'mvue_pack': (pack.mvue_pack, w, key),
  }.items():  # fmt: skip
    yield name, _unequal(_run('triton', op, *args), _run('reference', op, *args))
  # Exponentials round otherwise than XLA's; what is picked is exact.
  made = _run('triton', activations.activation_backward_pack, dh[:, :128], w[:, :256], key)
  expected = _run('reference', activations.activation_backward_pack, dh[:, :128], w[:, :256], key)
  error = _tuning.relative_error(made.dense, expected.dense)
  yield 'activation_backward_pack', f'relative error {error:.2e}' if not error <= _tuning.TOLERANCE else _unequal(
    made.operand, _run('reference', pack.mvue_pack, made.dense, key).operand
  )


def _run(implementation: str, op: Any, *args: Any) -> Any:
  return jax.jit(functools.partial(op, implementation=implementation))(*args)


def _unequal(found: Any, expected: Any) -> str | None:
  counts = differing(found, expected)
  return f'{counts} entries differ in its results' if any(counts) else None
