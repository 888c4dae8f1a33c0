"""Triton kernels for a GPU or Triton's interpreter; the plain forms next to their callers are the definitions."""
