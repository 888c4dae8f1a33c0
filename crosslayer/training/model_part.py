"""The model of a recipe: its size, shape and method, or an existing model.

Sizes 2M to 468M are those of arXiv 2410.17897, Table 4, named by their parameters with its vocabulary of 50,277:
Llama layers, untied embeddings and head, rotary base 10,000. The others suit a CPU.
"""

from functools import partial
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.methods import load_methods
from crosslayer.training.attention import Attention
from crosslayer.training.recipe_file import Part, WrongKey, one_of, only_keys, typed_keys

# keys of a shape that are required without a size
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
ELSEWHERE = {  # keys of a config that a shape cannot set, and what to do instead
    "cross_layer": "set model.method instead",
    "vocab_size": "the tokenizer sets it",
    "bos_token_id": "the tokenizer sets it",
    "eos_token_id": "the tokenizer sets it",
    "pad_token_id": "the tokenizer sets it",
    "use_cache": "training uses no cache",
    "pretraining_tp": "it has no effect",
}
POSITIVE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
# layers; a typo must not build a model for hours
DEEPEST = 4096
CONFIG: dict[str, Any] = LlamaConfig.__annotations__ | CrossLayerConfig.__annotations__
CONFIG |= {"rope_parameters": dict[str, Any] | None}
SHAPE: dict[str, Any] = {
    **{key: kind for key, kind in CONFIG.items() if key not in ELSEWHERE},
    **{key: Annotated[CONFIG[key], Field(ge=1)] for key in POSITIVE},
    "num_hidden_layers": Annotated[int, Field(ge=1, le=DEEPEST)],
    "hidden_act": Annotated[str, AfterValidator(partial(one_of, names=ACT2FN))],
}
Shape = Annotated[
    dict[str, Any], typed_keys(SHAPE), BeforeValidator(partial(only_keys, known=SHAPE, elsewhere=ELSEWHERE))
]
SIZES: dict[str, dict[str, Any]] = {  # keys of a config, which `model.shape` can override
    name: {
        **dict(zip(NEEDED, numbers, strict=True)),
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    for name, numbers in {
        "tiny": (4, 4, 64, 176),
        "mini": (8, 4, 128, 352),
        "small": (8, 4, 256, 704),
        "2M": (4, 2, 16, 56),
        "82M": (8, 8, 512, 1792),
        "180M": (12, 12, 768, 2688),
        "468M": (24, 16, 1024, 3584),
    }.items()
}


class ModelPart(Part):
    """The model: a size, a shape or both, with a method; or an existing model to continue from."""

    size: Annotated[str, AfterValidator(partial(one_of, names=SIZES))] | None = None
    """A named shape; `shape` overrides keys of it."""
    shape: Shape = {}
    """Keys of a Llama config or of `CrossLayerConfig`, such as `num_key_value_heads`; without `size` at least
    `num_hidden_layers`, `num_attention_heads`, `hidden_size` and `intermediate_size`."""
    method: str | dict[str, Any] | list[Any] | None = None
    """A method's name, `{name: NAME, option: VALUE}`, or a list of these; null is a plain Transformer."""
    start: str | None = Field(default=None, min_length=1)
    """Instead of the above: an existing model to continue training, as a folder, a hub name or an embedded model."""
    attention: Attention | None = None
    """`sdpa`, one document at a time; `flash`, FlashAttention-2. Null: `sdpa`, or `eager` with a dense mask for models
    that cap attention scores."""

    @field_validator("method", mode="plain")
    @classmethod
    def _check_method(cls, method: Any) -> Any:
        if method is None:
            return None
        if not isinstance(method, str | dict | list):
            raise ValueError(
                f"must be a method's name, {{name: NAME, option: VALUE}} or a list of these, got {method!r}"
            )
        load_methods(method)
        return method

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        """Check that the model can be built, first without the method, so that the error names the right key."""
        missing = [key for key in NEEDED if key not in self.shape]
        if self.start is not None:
            if self.size or self.shape or self.method:
                raise WrongKey("start", "cannot be combined with size, shape or method; remove these")
            return self
        if self.size is None and missing:
            raise WrongKey("size", f"missing; set one of {', '.join(SIZES)}, or in shape {', '.join(NEEDED)}")
        # whether keys fit together only the model's own code knows; on the meta device it takes no memory
        for key, model in {"shape": self.model_copy(update={"method": None}), "method": self}.items():
            try:
                with torch.device("meta"):
                    CrossLayerForCausalLM(model.config(length=512, vocab_size=512))
            except Exception as error:  # torch and transformers raise many types
                message = f"unknown {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
                raise WrongKey(key, message[:300]) from None
        return self

    def config(self, length: int, vocab_size: int, **special: int | None) -> CrossLayerConfig:
        """Return the config of a new model for sequences of `length` tokens, or more if the shape says so.

        `special` are the tokenizer's `bos_token_id`, `eos_token_id` and `pad_token_id`.
        """
        assert self.start is None, "an existing model has its own config"
        settings: dict[str, Any] = {"max_position_embeddings": length, **SIZES.get(self.size or "", {}), **self.shape}
        settings |= {"bos_token_id": None, "eos_token_id": None, **special}
        return CrossLayerConfig(**settings, cross_layer=self.method, vocab_size=vocab_size)
