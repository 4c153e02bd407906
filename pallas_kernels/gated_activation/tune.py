"""Times every setting of the activations' kernels and keeps the bandwidth of each.

`python -m pallas_kernels tune gated_activation` is the way in.
"""

import functools

from pallas_kernels import _passes
from pallas_kernels.gated_activation.bench import OP

arguments = _passes.tune_arguments
run = functools.partial(_passes.tune, OP)
