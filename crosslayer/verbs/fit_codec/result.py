"""A codec, and what it costs: bytes and KL by domain, times beside prefill."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from crosslayer.codec.codec import Codec
from crosslayer.output.record import Frozen, ModelFacts, Options, Seed
from crosslayer.output.result import Result
from crosslayer.stats.estimate import Estimate


class CodecSettings(Options):
    """The options."""

    share: float | None = Field(gt=0, lt=1)
    kl: float | None = Field(gt=0)
    calibration: int = Field(ge=3)
    length: int = Field(ge=32)
    windows: int = Field(ge=2)
    prompt: int = Field(ge=16)
    continued: int = Field(ge=1)
    repeats: int = Field(ge=1)
    seed: Seed
    bos: str


class CodecRow(Frozen):
    """One way to store a cache, on all windows or on those of a domain."""

    way: str
    scope: str = Field(description="all, or a domain")
    share: float = Field(description="of the bytes of the 16-bit cache, everything counted")
    kl: Estimate = Field(description="nats per token over the tokens behind the prompt")


class CodecTimes(Frozen):
    """Seconds of a prompt, and how they compare with its prefill."""

    prefill: float
    encode: float
    decode: float
    encode_ratio: Estimate
    decode_ratio: Estimate


class CodecReport(Result):
    """What `crosslayer.fit_codec` returns; `codec` is there until the report is loaded from a folder."""

    schema_: Literal["crosslayer/fit_codec/1"] = Field(default="crosslayer/fit_codec/1", alias="schema")
    model: ModelFacts
    rows: tuple[CodecRow, ...]
    fitted_to: tuple[str, ...]
    parameters: int
    bytes_per_token: int
    times: CodecTimes
    settings: CodecSettings
    fitting: float = Field(description="seconds until the codec was there")
    seconds: float
    _codec: Codec | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.row("codec") is None:
            raise ValueError("rows must have the codec on all windows")
        return self

    @property
    def codec(self) -> Codec:
        """The codec."""
        if self._codec is None:
            raise ValueError("a report that was loaded has no codec; use load_codec with its folder")
        return self._codec

    def row(self, way: str, scope: str = "all") -> CodecRow | None:
        """Return a row; None if there is none."""
        return next((row for row in self.rows if (row.way, row.scope) == (way, scope)), None)

    def headline(self) -> dict[str, Any]:
        """Return share, KL and times."""
        row = self.row("codec")
        assert row is not None, "checked on construction"
        return {
            "model": self.model.name,
            "share": round(row.share, 4),
            "kl": round(row.kl.value, 5),
            "decode_over_prefill": round(self.times.decode_ratio.value, 3),
            "encode_over_prefill": round(self.times.encode_ratio.value, 3),
        }

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        if self._codec is not None:
            self._codec.save(folder)
