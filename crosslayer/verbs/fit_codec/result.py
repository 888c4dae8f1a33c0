"""A codec and its costs: bytes, KL by domain, and times relative to prefill."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr

from crosslayer.codec.codec import Codec
from crosslayer.judge.report import Report
from crosslayer.output.record import Options, Seed


class CodecSettings(Options):
    """The options."""

    share: float | None = Field(gt=0, lt=1)
    kl: float | None = Field(gt=0)
    calibration: int = Field(ge=3)
    length: int = Field(ge=32)
    windows: int = Field(ge=2)
    prompt: int = Field(ge=16)
    continued: int = Field(ge=1)
    numbers: int = Field(ge=0, multiple_of=5)
    tasks: tuple[str, ...] = ()
    limit: int | None = Field(default=None, ge=1)
    repeats: int = Field(ge=1)
    seed: Seed
    bos: str


class CodecReport(Report):
    """What `crosslayer.fit_codec` returns; `codec` is there until the report is loaded from a folder.

    Candidates are ways to store a cache: the codec, the codec with fewer bytes, quantized caches. A row of bytes is of
    a stored prompt, everything counted; rows of encoding and decoding have the time of prefill as the original's.
    """

    schema_: Literal["crosslayer/fit_codec/2"] = Field(default="crosslayer/fit_codec/2", alias="schema")
    settings: CodecSettings
    fitted_to: tuple[str, ...]
    parameters: int = Field(description="numbers of the codec's matrices")
    bytes_per_token: int = Field(description="of the 16-bit cache")
    fitting: float = Field(description="seconds until the codec was there")
    _codec: Codec | None = PrivateAttr(default=None)

    @property
    def codec(self) -> Codec:
        """The codec."""
        if self._codec is None:
            raise ValueError("a report that was loaded has no codec; use load_codec with its folder")
        return self._codec

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        if self._codec is not None:
            self._codec.save(folder)
