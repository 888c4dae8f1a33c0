"""Figures that are drawn once, since drawing one takes as long as running a small model."""

import json

import pytest
import vl_convert

DRAWN: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def figures_are_drawn_once():
    """Draw a figure when its title and marks are new; the files of others hold what was drawn then.

    What is in a figure is tested in tests/output.
    """
    draw = vl_convert.vegalite_to_svg

    def drawn_once(spec, **options):
        kind = json.dumps([spec["title"], [layer["mark"] for layer in spec["layer"]]])
        if kind not in DRAWN:
            DRAWN[kind] = draw(spec, **options)
        return DRAWN[kind]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vl_convert, "vegalite_to_svg", drawn_once)
        yield
