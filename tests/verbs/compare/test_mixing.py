"""The depth-mixing matrices of variants, side by side in one figure."""

from types import SimpleNamespace

import numpy as np

from crosslayer.training.record import DepthMixing
from crosslayer.verbs.compare.figures import _mixing


def compared(tables):
    """Return a comparison with a run for each table of a variant."""
    runs = {
        variant: [
            SimpleNamespace(
                depth_mixing=None if table is None else DepthMixing(readers=["0 attn", "0 mlp"], weights=table)
            )
            for table in each
        ]
        for variant, each in tables.items()
    }
    return SimpleNamespace(ordered=list(runs), runs_of=lambda configuration, variant: runs[variant])


def test_matrices_stand_side_by_side_relative_to_each_rows_largest_weight():
    ones, one, other = [[1, None], [1, 1]], [[0.5, None], [0.2, 0.8]], [[1.5, None], [0.6, -2.0]]
    record = compared({"vanilla": [ones], "attnres": [one, other], "unknown": [None]})
    (panel,) = _mixing(record, SimpleNamespace(label=""), "_0")
    assert panel.key == "depth_mixing_0" and [*panel.x_ticks.values()] == ["vanilla", "attnres"]
    # means over seeds are 1, then 0.4 and −0.6; a column between variants is empty
    expected = [[1, None, None, 1, None, None], [1, 1, None, 0.4 / 0.6, -1, None]]
    drawn = np.array(panel.heat.z, dtype=float)
    np.testing.assert_allclose(drawn, np.array(expected, dtype=float))
    assert panel.heat.limits == (-1.0, 1.0)


def test_a_single_matrix_is_no_comparison():
    assert _mixing(compared({"vanilla": [[[1, None], [1, 1]]], "cla": [None]}), SimpleNamespace(label=""), "") == []
