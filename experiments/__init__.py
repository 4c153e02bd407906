"""Programs that use the library: training, tuning, reports. Free to change; not installed with the package.

`runs` trains: `data`, `models`, `tasks` and `configs` in it are what a run is made of, `race` compares runs that are
tuned alike. `bench` measures; its `scale` is what simulated devices exchange. `reports` makes pages of what the others
left, `results` has the records. Which room may import which: `tests/import_graph_test.py`.
"""
