"""Measurements: each program prints a table and appends one record to `experiments/results/`."""
