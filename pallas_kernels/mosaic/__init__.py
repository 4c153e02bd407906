"""PTX and Mosaic GPU helpers that the kernels of several ops use."""
