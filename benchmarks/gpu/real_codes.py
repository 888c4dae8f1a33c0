"""Real codes of stored prompts, for machines without the models: a block of SmolLM2 and one of Qwen.

    python benchmarks/gpu/real_codes.py smollm2=codec qwen=codec-qwen     # writes benchmarks/gpu/real_codes.safetensors

The file has, for each model, a block of 256 tokens of a speech as a store keeps it, and the class of each channel.
"""

import argparse
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from crosslayer.codec.entropy import Coder

FILE = Path(__file__).with_suffix(".safetensors")
TOKENS = 256


def names() -> list[str]:
    """Return the models in the file."""
    return [key.removesuffix(".parts") for key in load_file(FILE) if key.endswith(".parts")]


def load(name: str, tokens: int = TOKENS - 1) -> tuple[list[np.ndarray], list[Tensor]]:
    """Return the codes (R, T), int16, of a model's layers, and the classes of their channels (R,).

    The block has a code for all of its tokens but the first.
    """
    stored = load_file(FILE)
    sizes = stored[f"{name}.channels"].tolist()
    together = torch.from_numpy(stored[f"{name}.classes"].astype(np.int64))
    classes = list(together.split(sizes))
    ends = list(accumulate(stored[f"{name}.sizes"].tolist()))
    data = stored[f"{name}.parts"].tobytes()
    parts = [data[end - size : end] for end, size in zip(ends, stored[f"{name}.sizes"].tolist(), strict=True)]
    codes = [np.empty((size, TOKENS - 1), np.int16) for size in sizes]
    Coder(classes).decode(parts, codes)
    return [own[:, :tokens] for own in codes], classes


def main() -> None:
    """Encode a text of each model."""
    import crosslayer
    from crosslayer.cache.running import prefill
    from crosslayer.codec import format
    from crosslayer.corpus.domains import embedded_domains, split_domains

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="+", metavar="MODEL=FOLDER")
    given, tensors = parser.parse_args(), {}
    for pair in given.codecs:
        name, _, folder = pair.partition("=")
        model, tokenizer = crosslayer.load_model(name)
        codec = crosslayer.load_codec(folder, model, tokenizer)
        parts = {"text": {"speeches": 1}}
        ids = split_domains(embedded_domains(["speeches"]), tokenizer, parts=parts, length=TOKENS)["text"].ids
        ((_, (packed,)),) = format.unpack_file(codec.encode(prefill(model, ids), ids))
        block = format.unpack(packed, codec.widths, len(codec.chain.coder.runs))
        classes = [layer.classes for layer in codec.chain.layers]
        tensors[f"{name}.classes"] = torch.cat(classes).numpy().astype(np.uint8)
        tensors[f"{name}.channels"] = np.array([len(own) for own in classes], np.int32)
        tensors[f"{name}.sizes"] = np.array([len(part) for part in block.parts], np.int32)
        tensors[f"{name}.parts"] = np.frombuffer(b"".join(block.parts), np.uint8)
    save_file(tensors, FILE)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
