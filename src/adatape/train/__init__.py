"""Training: a step-by-step trainer, and runs with checkpoints, metrics and results in a folder."""
