"""What Triton kernels of several ops share."""
