"""Triton kernels of Algorithm 2: token selection without gradient, and the gradient of the selected tokens' weights."""
