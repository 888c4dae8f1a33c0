"""A decoder as stages of `torch.distributed.pipelining`, with the cross-stage caching of Attention Residuals."""

from crosslayer.core.pipeline.save import save_stages
from crosslayer.core.pipeline.stages import pipeline_stages

__all__ = ["pipeline_stages", "save_stages"]
