"""Programs that use the library: training, tuning, reports. Free to change; not installed with the package.

`data`, `models`, `tasks` and `configs` are what programs are made of. Programs train (`runs`; `race`, which tunes many
methods alike and trains them for the same seconds), measure (`bench`; `scale`, what simulated devices exchange), or
make pages of what the others left (`reports`). `race` and `scale` have rooms of their own since records keep `python -m
experiments.race` and `python -m experiments.scale` as their commands. Which room may import which:
`tests/import_graph_test.py`.
"""
