"""Measures: what a model scores, and what it costs."""
