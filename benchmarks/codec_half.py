"""Compares decoding in float16, as on a GPU, with float32: KL on the same windows, emulated on a CPU.

    python benchmarks/codec_half.py smollm2=codec [gemma3=codec-gemma …] [--windows 24] [--out FILE]

A codec is a folder that `crosslayer fit-codec MODEL --out FOLDER` wrote. The text is what `fit-codec` measures on by
default. The ratio is the geometric mean over windows of the KL with float16 over that with float32, with a bootstrap
over documents.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import crosslayer
from crosslayer.codec.quality import coded, costs_and_sizes
from crosslayer.corpus.domains import EMBEDDED, FITTED, embedded_domains, shared_out, split_domains
from crosslayer.environment import environment
from crosslayer.stats.bootstrap import Bootstrap


def in_half(codec):
    """Return the way of a codec that decodes in float16."""

    def way(cache, ids):
        data = codec.encode(cache, ids)
        return codec.decode(data, dtype=cache.layers[0].keys.dtype, half=True), len(data)

    return way


def main() -> None:
    """Print a ratio for each codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="+", metavar="MODEL=FOLDER")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=0, help="default: 640, or what the model's windows hold")
    parser.add_argument("--out", type=Path)
    given, rows = parser.parse_args(), []
    judged = [name for name in EMBEDDED if name not in FITTED]
    for pair in given.codecs:
        name, _, folder = pair.partition("=")
        model, tokenizer = crosslayer.load_model(name)
        codec = crosslayer.load_codec(folder, model, tokenizer)
        prompt = given.prompt or min(640, *(shape.window - 1 for shape in codec.shapes if shape.window), 640)
        parts = {"text": shared_out(given.windows, judged)}
        windows = split_domains(embedded_domains(judged), tokenizer, parts=parts, length=prompt + 128, seed=3)["text"]
        costs, sizes = costs_and_sizes(model, windows, prompt, {"float32": coded(codec), "float16": in_half(codec)})
        kl = {way: found.means["kl"] for way, found in costs.items()}
        change = np.log(kl["float16"]) - np.log(kl["float32"])
        ratio = Bootstrap(tuple(windows.documents)).ratio(change)
        share = np.mean(sizes["float32"]) / (prompt * 2 * sum(codec.widths))
        rows.append(
            {"model": name, "share": share, "prompt": prompt, "kl": {way: one.tolist() for way, one in kl.items()}}
        )
        rows[-1]["ratio"] = [ratio.value, *(ratio.interval or ())]
        print(f"{name}, {100 * share:.1f}%: KL {kl['float32'].mean():.5f}; float16 ÷ float32", ratio.text(3))
    if given.out:
        given.out.write_text(json.dumps({"rows": rows, **environment().model_dump()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
