"""Times every setting of the packing kernels and keeps the bandwidth of each; `python -m pallas_kernels tune pack`."""

import functools

from pallas_kernels import _passes
from pallas_kernels.pack.bench import OP

arguments = _passes.tune_arguments
run = functools.partial(_passes.tune, OP)
