"""Sizes that the Hopper kernels share."""

from pallas_kernels.arch import SM_90A

CONSUMERS = 2  # warpgroups that multiply
SHARED_MEMORY = SM_90A.shared_memory


def ceil(a: int, b: int) -> int:
  return -(-a // b)
