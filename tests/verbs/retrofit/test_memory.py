"""Prefill of a retrofit never holds a map; the whole command never holds the model twice."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.text import tokenizer
from tests.helpers.tiny import tiny

CODE = """
import torch
from crosslayer.core.methods import load_method
from crosslayer.core.decoder.convert import convert_weights
from tests.helpers.tiny import tiny

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

torch.set_num_threads(1)
sizes = {"num_hidden_layers": 3, "max_position_embeddings": 8192, "dtype": torch.float32}
model = convert_weights(tiny("llama", implementation=IMPLEMENTATION, **sizes), [load_method(METHOD)]).model
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


WHOLE = """
import sys
import torch
import vl_convert
import crosslayer, crosslayer.verbs.retrofit.run, crosslayer.verbs.retrofit.page
from crosslayer.probe.what_if import find_sublayers
from tests.helpers.tiny import VOCABULARY, tiny

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

torch.set_num_threads(1)
find_sublayers(tiny("llama", dtype=torch.bfloat16))
vl_convert.vegalite_to_svg({"data": {"values": [{"x": 1}]}, "mark": "point", "encoding": {"x": {"field": "x"}}})
ids, before = torch.randint(3, VOCABULARY, (73 + 18, 64)), peak()
fit = {"compensation": "layerwise", "calibration": 73, "windows": 18}  # moments of W_o would be as large as the weights
report = crosslayer.retrofit(sys.argv[1], ids, method="uniattn", layers="1-2", length=64, dtype="bfloat16", **fit)
report.save(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.slow  # 180 million parameters
def test_a_whole_retrofit_holds_the_weights_once(tmp_path):
    """From loading to the manifest, whose logits are in float32: shared, mapped, and cast layer by layer."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16}
    tiny("llama", dtype=torch.bfloat16, **shape).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    words = [sys.executable, "-c", WHOLE, tmp_path / "model", tmp_path / "out"]
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    assert 3.4e8 < weights < int(found.stdout) < 2 * weights
