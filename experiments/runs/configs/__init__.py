"""Experiments as data: every file has `get_config(tiny=False)` and says its question, its cost and its command.

`tiny=True` gives the experiment's twin for tests: the same settings on a model and a batch that train in a second.
"""
