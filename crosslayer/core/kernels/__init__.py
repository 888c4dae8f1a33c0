"""Triton kernels for a GPU or Triton's interpreter; the plain forms beside their callers are the definitions."""
