"""The result of an export."""

from typing import Any

from crosslayer.output.record import Frozen


class Exported(Frozen):
    """What was written: the name of the model, its form, what opens it, layers and parameters there, bytes in all."""

    model: str
    to: str
    architecture: str
    layers: int
    parameters: int
    dtype: str
    bytes: int

    def headline(self) -> dict[str, Any]:
        """Return all figures."""
        return self.model_dump()
