"""Attention on CPU: a batched backend, and kernels on torch's scaled dot product attention."""
