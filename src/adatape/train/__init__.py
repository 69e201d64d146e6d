"""Training: a steppable trainer, and runs that leave a folder behind."""
