"""The result of `generate`."""

from typing import Any

from pydantic import Field

from crosslayer.output.formatting import Shown
from crosslayer.output.record import Frozen
from crosslayer.wiring.kv_bits import parse_kv_bits


class Continuation(Shown, Frozen):
    """A prompt and its continuation without special tokens, with speed and KV cache size."""

    model: str
    prompt: str
    text: str
    new_tokens: int
    seconds: float
    tokens_per_second: float
    cache_bytes: int = Field(description="allocated, in the dtype of the run")
    kv_share: float | None = Field(description="of the original's 16-bit cache; None if no plan counts that")

    kv_bits: str | None = Field(description="bits of the KV cache; None: not quantized")

    def sentences(self) -> list[str]:
        """Return an empty line, which ends the text printed piece by piece, and how the cache is quantized."""
        return (
            [""] if self.kv_bits is None else ["", f"The KV cache is quantized ({parse_kv_bits(self.kv_bits).about})."]
        )

    def headline(self) -> dict[str, Any]:
        """Return the model's name and the figures."""
        return self.model_dump(exclude={"prompt", "text"})
