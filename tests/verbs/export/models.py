"""Tiny models of ours that have, or lack, a form elsewhere."""

from crosslayer.core.decoder.convert import to_model
from crosslayer.testing.tiny import build, config_of
from tests.helpers.bytelevel import byte_level
from tests.helpers.tiny import tiny

SIZE = 400
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPES = {
    "plain": ([], {}),
    "tied": ([], {"tie_word_embeddings": True}),
    "without attention": ([{"name": "drop", "attention": [2, 4]}], {}),
    "with W_c": ([{"name": "drop", "attention": [0, 3], "compensation": "attention"}], {}),
    "whole layers": ([{"name": "drop", "layers": [0, 5]}], {}),
    "both": ([{"name": "drop", "attention": [3], "layers": [1, 4]}], {}),
    "without MLPs": ([{"name": "drop", "mlp": [1], "attention": [4]}], {}),
    "biases": ([{"name": "drop", "attention": [2]}], {"attention_bias": True, "mlp_bias": True}),
    "some biases": ([], {"attention_bias": True, "attention_output_bias": False}),
    "llama3": ([{"name": "drop", "attention": [1]}], {"rope_parameters": LLAMA3}),
    "linear": ([], {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "own head size": ([{"name": "drop", "attention": [5]}], {"head_dim": 16}),
}


def ours(shape):
    """Return a model of 6 layers in float32, of SHAPES or of methods."""
    methods, changes = SHAPES[shape] if isinstance(shape, str) else (shape, {})
    return build(config_of(methods, vocab_size=SIZE, **changes)).float()


def of_family(family, **changes):
    """Return ours with the weights of a tiny model of another family, in float32."""
    return to_model(tiny(family, vocab_size=SIZE, **changes)).float()


def words(name="smollm"):
    """Return a tokenizer for them."""
    return byte_level(name, SIZE - 20)  # the last 20 ids are nobody's
