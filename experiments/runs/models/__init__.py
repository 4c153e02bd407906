"""Models to train: plain Flax code that knows nothing of sparsity."""
