"""Sizes that the Hopper kernels share."""

CONSUMERS = 2  # warpgroups that multiply


def ceil(a: int, b: int) -> int:
  return -(-a // b)
