"""Pages about runs and about records, and the programs that end in one."""
