"""Programs that use the library: training, tuning, reports. Free to change; not installed with the package."""
