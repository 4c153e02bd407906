"""What users call with a model, of Flax or a function: `sparsify`, `project`, and the checks of a model and a step."""
