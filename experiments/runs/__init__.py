"""Training: methods, programs that compile, checkpoints, run folders, sweeps, races."""
