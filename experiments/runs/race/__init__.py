"""Who reaches a loss first: methods trained for the same seconds, each tuned with the same budget."""
