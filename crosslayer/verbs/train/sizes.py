"""Shapes of models by name.

2M to 468M are those of arXiv 2410.17897, Table 4, named by their parameters with its vocabulary of 50,277: Llama's
layers, embeddings and head untied, rotary base 10,000. The others suit a CPU.
"""

from typing import Any


def _shape(layers: int, heads: int, hidden: int, mlp: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


SIZES: dict[str, dict[str, Any]] = {
    "tiny": _shape(4, 4, 64, 176),
    "mini": _shape(8, 4, 128, 352),
    "small": _shape(8, 4, 256, 704),
    "2M": _shape(4, 2, 16, 56),
    "82M": _shape(8, 8, 512, 1792),
    "180M": _shape(12, 12, 768, 2688),
    "468M": _shape(24, 16, 1024, 3584),
}
"""Name → keys of a config, which `model.shape` of a recipe may override."""
