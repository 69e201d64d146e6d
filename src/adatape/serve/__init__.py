"""A trained run behind HTTP: answers at any budget, batched by length, and a page to explore it."""
