"""Pipeline stages of Attention Residuals, measured: bytes, gradients and step times."""
