"""A decoder as stages of `torch.distributed.pipelining`, with the cross-stage caching of Attention Residuals."""
