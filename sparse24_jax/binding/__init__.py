"""How a model is traced and its matmuls made sparse.

Begin with `bound`, what one trace says of the weights, then `transform` and `interpreter`, which run the traced model.
`flow` and `beside` look for uses that would read a weight dense.
"""
