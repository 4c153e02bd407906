"""What a run learns, as a value: see `task.Task`, and `task.get` for those that there are."""
