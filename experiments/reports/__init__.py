"""Pages about runs and about benchmark records."""
