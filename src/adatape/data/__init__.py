"""Data sets and loaders; a batch is a function of seed and step."""
