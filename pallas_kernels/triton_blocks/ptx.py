"""Single PTX instructions as Triton device functions, where the language has none that compiles to them alone."""

import triton
import triton.language as tl


@triton.jit
def prmt(a, b, selector):
  """Four of the eight bytes of `a` (0 to 3) and `b` (4 to 7), one a nibble of the selector's low half.

  A nibble with its highest bit set gives the byte's sign, eight times.
  """
  return tl.inline_asm_elementwise(
    'prmt.b32 $0, $1, $2, $3;', '=r,r,r,r', [a, b, selector], dtype=tl.uint32, is_pure=True, pack=1
  )


@triton.jit
def prefetch(address, there):
  """Has the GPU bring the line of an address into its L2 cache where `there`, a uint32, is not zero."""
  tl.inline_asm_elementwise(
    '{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }', '=r,l,r', [address, there],
    dtype=tl.uint32, is_pure=False, pack=1,
  )  # fmt: skip


@triton.jit
def as_float(bits):
  """float32 from its bits, hidden from LLVM: it makes logic of a magnitude, which is part of an addition for free."""
  return tl.inline_asm_elementwise('mov.b32 $0, $1;', '=f,r', [bits], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def greater(x, y):
  """1.0 where x > y, else 0.0; 0.0 with a NaN."""
  return tl.inline_asm_elementwise(
    'set.gt.f32.f32 $0, $1, $2;', '=f,f,f', [x, y], dtype=tl.float32, is_pure=True, pack=1
  )


@triton.jit
def at_least(x, y):
  """1.0 where x >= y, else 0.0; 0.0 with a NaN."""
  return tl.inline_asm_elementwise(
    'set.ge.f32.f32 $0, $1, $2;', '=f,f,f', [x, y], dtype=tl.float32, is_pure=True, pack=1
  )


@triton.jit
def exp2(x):
  """2^x, two units in the last place off at most; subnormal results are zero."""
  return tl.inline_asm_elementwise('ex2.approx.ftz.f32 $0, $1;', '=f,f', [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
  """1 / x, one unit in the last place off at most; subnormal results are zero."""
  return tl.inline_asm_elementwise('rcp.approx.ftz.f32 $0, $1;', '=f,f', [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def round_pair(low, high, dtype: tl.constexpr):
  """Two float32 rounded to 16 or 8 bits, in a uint32: `low` lowest, zeros above.

  To nearest even. In float8 what is beyond the largest value, infinities included, becomes the largest; NaN stays NaN.
  One by one they take a unit that is four times slower.
  """
  if dtype == tl.bfloat16:
    return tl.inline_asm_elementwise(
      'cvt.rn.bf16x2.f32 $0, $2, $1;', '=r,f,f', [low, high], dtype=tl.uint32, is_pure=True, pack=1
    )
  elif dtype == tl.float16:
    return tl.inline_asm_elementwise(
      'cvt.rn.f16x2.f32 $0, $2, $1;', '=r,f,f', [low, high], dtype=tl.uint32, is_pure=True, pack=1
    )
  elif dtype == tl.float8e4nv:
    return tl.inline_asm_elementwise(
      '{ .reg .b16 low, high; mov.b16 high, 0; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; mov.b32 $0, {low, high}; }',
      '=r,f,f', [low, high], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
  else:
    tl.static_assert(dtype == tl.float8e5, 'no rounding to this dtype')
    return tl.inline_asm_elementwise(
      '{ .reg .b16 low, high; mov.b16 high, 0; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; mov.b32 $0, {low, high}; }',
      '=r,f,f', [low, high], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def round_quad(a, b, c, d, dtype: tl.constexpr):
  """Four float32 rounded to float8 as by `round_pair`, in a uint32, `a` lowest."""
  if dtype == tl.float8e4nv:
    return tl.inline_asm_elementwise(
      '{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;'
      ' mov.b32 $0, {low, high}; }', '=r,f,f,f,f', [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
  else:
    tl.static_assert(dtype == tl.float8e5, 'no rounding to this dtype')
    return tl.inline_asm_elementwise(
      '{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;'
      ' mov.b32 $0, {low, high}; }', '=r,f,f,f,f', [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
