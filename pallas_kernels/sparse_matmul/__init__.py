"""Matmul of a 2:4-sparse and a dense matrix."""

from pallas_kernels.operand import from_operand as from_operand
from pallas_kernels.operand import SparseOperand as SparseOperand
from pallas_kernels.operand import to_operand as to_operand
from pallas_kernels.sparse_matmul.api import sparse_matmul as sparse_matmul
