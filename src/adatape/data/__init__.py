"""Data: streams keyed by seed and step, so that a batch does not depend on what came before it."""
