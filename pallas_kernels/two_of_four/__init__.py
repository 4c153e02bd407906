"""What 2:4 means, in plain `jax.numpy`: masks, the soft threshold, and samples with their random numbers."""
