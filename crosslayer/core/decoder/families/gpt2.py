"""GPT-2: LayerNorm, an MLP without a gate, learned positions. Pretrained weights have another layout: none convert."""

from torch import nn

from crosslayer.core.decoder.families import PLAIN_MLP, Family, PlainMLP

FAMILY = Family(norm=nn.LayerNorm, mlp=PlainMLP, mlp_split=PLAIN_MLP, experts=False, learned_positions=True)
