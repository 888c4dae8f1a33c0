"""The result of an export."""

from typing import Any

from crosslayer.output.formatting import Shown
from crosslayer.output.record import Frozen


class Exported(Shown, Frozen):
    """What was written: model name, format, architecture, layers, parameters and total bytes."""

    model: str
    to: str
    architecture: str
    layers: int
    parameters: int
    dtype: str
    bytes: int

    def sentences(self) -> list[str]:
        """Return a sentence on what was written."""
        size = f"{self.layers} layers, {self.parameters / 1e6:.1f} M parameters, {self.bytes:,} bytes"
        return [f"{self.architecture}: {size}, in {self.dtype}."]

    def headline(self) -> dict[str, Any]:
        """Return all figures."""
        return self.model_dump()
