"""What a run learns, as a value: see `task.Task`; `known.TASKS` are those that there are."""
