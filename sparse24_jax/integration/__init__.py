"""The doors to Flax and to functions: `sparsify`, what it returns, `project`, and the checks of a model and a step."""
