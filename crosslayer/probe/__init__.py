"""Look inside a pretrained model without changing what it computes."""
