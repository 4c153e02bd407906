"""Times every setting of rounding to float8 and keeps its bandwidth; `python -m pallas_kernels tune quantize`."""

import functools

from pallas_kernels import _passes
from pallas_kernels.quantize.bench import OP

arguments = _passes.tune_arguments
run = functools.partial(_passes.tune, OP)
