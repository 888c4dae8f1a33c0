"""Read the attention and the residual stream of a pretrained model without changing what it computes."""
