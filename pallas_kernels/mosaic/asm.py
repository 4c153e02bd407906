"""Pieces of Mosaic GPU kernels that write PTX themselves: registers, addresses, inline assembly, plain arithmetic."""

from typing import Any

import numpy as np

from pallas_kernels import _compat as compat

THREADS = 128  # of a warpgroup


def i32() -> Any:
  return compat.ir.IntegerType.get_signless(32)


def i64() -> Any:
  return compat.ir.IntegerType.get_signless(64)


def f32() -> Any:
  return compat.ir.F32Type.get()


def asm(text: str, operands: Any = (), constraints: str = '') -> None:
  void = compat.ir.Type.parse('!llvm.void')
  compat.llvm.inline_asm(void, list(operands), text, constraints, has_side_effects=True)


def address(ref: Any) -> Any:
  return compat.llvm.ptrtoint(i64(), compat.utils.memref_ptr(ref))


def add(x: Any, y: Any) -> Any:
  return compat.llvm.add(x, y, overflow_flags=compat.llvm.IntegerOverflowFlags.none)


def scaled_thread(scale: int) -> Any:
  """Index of the thread in its warpgroup, times `scale`, as i64."""
  thread = compat.arith.remui(compat.utils.thread_idx(), compat.utils.c(THREADS, i32()))
  return compat.arith.extui(i64(), compat.arith.muli(thread, compat.utils.c(scale, i32())))


def lane_and_warp(memory: Any) -> tuple[Any, Any]:
  """The thread's place in its warp, and the address of the 32 bits of its warp in memory for a warpgroup's four."""
  thread = compat.arith.remui(compat.utils.thread_idx(), compat.utils.c(THREADS, i32()))
  warp_size = compat.utils.c(32, i32())
  lane, warp = compat.arith.remui(thread, warp_size), compat.arith.divui(thread, warp_size)
  place = compat.arith.extui(i64(), compat.arith.muli(warp, compat.utils.c(4, i32())))
  return lane, add(address(memory), place)


def larger_magnitude(largest: Any, value: Any) -> Any:
  """The larger of a magnitude and that of a float32, one instruction; NaN if either is."""
  text = '{ .reg .f32 magnitude; abs.f32 magnitude, $2; max.NaN.f32 $0, $1, magnitude; }'
  return compat.llvm.inline_asm(f32(), [largest, value], text, '=f,f,f')


def extract(register: Any, i: int = 0) -> Any:
  position = compat.ir.DenseI64ArrayAttr.get([i])
  return compat.vector.extract(register, dynamic_position=[], static_position=position)


def array_of_words(values: list[Any], layout: Any) -> Any:
  one = compat.ir.VectorType.get((1,), i32())
  registers = np.array([compat.vector.broadcast(one, v) for v in values], dtype=object)
  return compat.fragmented_array.FragmentedArray(
    _registers=registers.reshape(-1), _layout=layout.to_mgpu(), _is_signed=True
  )


def accumulator_of(registers: list[Any], like: Any) -> Any:
  """An accumulator of `like`'s shape and layout from its registers in order."""
  out = np.empty(len(registers), dtype=object)
  for i, r in enumerate(registers):
    out[i] = compat.vector.broadcast(compat.ir.VectorType.get((1,), f32()), r)
  return compat.fragmented_array.FragmentedArray(
    _registers=out.reshape(like.registers.shape), _layout=like.layout, _is_signed=None
  )


def floats(array: Any) -> list[Any]:
  """The float32 elements of a thread; registers of the WGMMA layout hold two."""
  return [extract(r, i) for r in array.registers.flat for i in range(2)]


def from_floats(values: list[Any], like: Any) -> Any:
  pair = compat.ir.VectorType.get((2,), f32())
  out = np.empty(len(values) // 2, dtype=object)
  for i in range(len(out)):
    out[i] = compat.vector.from_elements(pair, values[2 * i : 2 * i + 2])
  return compat.fragmented_array.FragmentedArray(
    _registers=out.reshape(like.registers.shape), _layout=like.layout, _is_signed=None
  )
