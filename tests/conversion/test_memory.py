"""Prefill of a retrofit never holds a map."""

import subprocess
import sys

import pytest

CODE = """
import torch
from crosslayer.methods import load_method
from crosslayer.conversion.convert import convert
from tests.helpers.tiny import tiny

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

torch.set_num_threads(1)
sizes = {"num_hidden_layers": 3, "max_position_embeddings": 8192, "dtype": torch.float32}
model = convert(tiny("llama", implementation=IMPLEMENTATION, **sizes), [load_method(METHOD)]).model
ids = torch.randint(3, 64, (1, 8192))
with torch.no_grad():
    model(ids[:, :64], use_cache=True)
    before = peak()
    model(ids, use_cache=True, logits_to_keep=1)
print(peak() - before)
"""


@pytest.mark.slow  # 8k tokens
@pytest.mark.parametrize(
    "method",
    [
        {"name": "uniattn", "superblocks": ((0, 1, 2),)},
        {"name": "cla", "groups": ((0, 1, 2),)},
        {"name": "svformer"},
        {"name": "drop", "attention": (1,)},
    ],
    ids=lambda method: method["name"],
)
def test_prefill_of_8192_tokens_holds_no_map(method):
    def grown(implementation):
        code = CODE.replace("METHOD", repr(method)).replace("IMPLEMENTATION", repr(implementation))
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return int(found.stdout)

    one_map = 8192 * 8192 * 4  # of one head in float32: 268 MB; there are 4 heads
    assert grown("sdpa") < one_map / 2
    if method["name"] == "uniattn":
        assert grown("eager") > 4 * one_map  # the measurement can tell
