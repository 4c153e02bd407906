"""V:N:M sparsity: blocks of V rows share four of each M columns, and each row keeps two of these four."""

from pallas_kernels.vnm.format import compress, CompressedVNM, decompress, verify
from pallas_kernels.vnm.reference import vnm_mask

__all__ = ['CompressedVNM', 'compress', 'decompress', 'verify', 'vnm_mask']
