"""What each operation computes, and on which chip.

One folder an operation, beside rooms of what several share. Its `reference.py` is the meaning, in plain `jax.numpy`;
every other back end is judged by it.
"""
