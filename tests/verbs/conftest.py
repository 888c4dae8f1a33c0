"""What tests of verbs share."""

from tests.helpers.figures import figures_are_drawn_once

__all__ = ["figures_are_drawn_once"]
