"""flash-linear-attention's kernel of attention over depth, in Triton's interpreter: the same function as ours.

It is the field's own kernel, and `benchmarks/gpu/depth_attention.py` times it on the same sources. Its entry refuses
CPUs and its autotuner measures on a GPU, so the kernel itself is called, with block sizes that it may choose.
"""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
fused = pytest.importorskip("fla.ops.attnres.fused")

from crosslayer.core.depth_attention import listed  # noqa: E402
from tests.core.kernels.test_interpreted import CLOSE, EPS, close, draw  # noqa: E402


class Whole(int):
    """A Python number where the kernel has one of Triton's: the interpreter counts loops in Python's."""

    def __rmul__(self, other):
        return Whole(int(self) * other)

    def to(self, dtype):
        return self


def read(sources, query, gain, block, output_gain=None):
    """Return the kernel's result (T, C) for sources (T, C), which it loads `block` at a time."""
    count, (tokens, width) = len(sources), sources[0].shape
    result, pre = torch.empty(tokens, width), torch.empty(tokens, width)
    inverses, scores, total = torch.empty(count, tokens), torch.empty(count, tokens), torch.empty(tokens)
    table = fused._build_ptr_table(sources)
    fused.attnres_fwd_kernel.fn[(tokens,)](
        q=query, res=table, w=gain, ow=output_gain, o=result, o_pre=pre, rstd=inverses, logit=scores, lse=total,
        N=tokens, L=count, L2=len(table), D=width, eps=EPS, scale=1.0, BL=Whole(block),
        BD=1 << (width - 1).bit_length(), HAS_ONORM=output_gain is not None, SAVE_OPRE=True,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("tokens, count, width", [(5, 3, 8), (3, 9, 64), (2, 17, 100)])
def test_their_kernel_is_our_function(tokens, count, width, block):
    sources, query, _ = draw(tokens, count, width)
    gain = torch.rand(width) + 0.5  # of their norm of keys, which our direction contains
    expected = listed([source.double() for source in sources], (query * gain).double(), EPS)
    assert close(read(sources, query, gain, block), expected, CLOSE)


def test_their_fused_norm_is_the_norm_behind_a_read():
    sources, query, _ = draw(4, 5, 64)
    ones, gain = torch.ones(64), torch.rand(64) + 0.5
    expected = listed([source.double() for source in sources], query.double(), EPS)
    expected = torch.nn.functional.rms_norm(expected, (64,), gain.double(), EPS)
    assert close(read(sources, query, ones, 2, gain), expected, CLOSE)
