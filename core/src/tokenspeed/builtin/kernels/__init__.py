"""Torch reference of every kernel family and mode: the definition that all other kernels are compared with. Clear before fast."""
