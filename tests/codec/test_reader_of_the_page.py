"""The program in docs/guides/store.md decodes every block, also those in which some layers or classes have no codes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from crosslayer.codec import format
from crosslayer.codec.codec import load_codec
from crosslayer.codec.store import PromptStore
from tests.helpers.codecs import cache_of, fitted, random_ids
from tests.test_docs import blocks

PAGE = "docs/guides/store.md"


@pytest.fixture(scope="module")
def read_block():
    """The function of the page, without the lines that use it."""
    (program,) = [block.body for block in blocks(PAGE) if "def read_block" in block.body]
    namespace = {}
    exec(program[: program.index("\n(path,) =")], namespace)  # our own page
    return namespace["read_block"]


@pytest.mark.parametrize("length", [1, 17, 40])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_block_is_decoded(tmp_path, read_block, family, length):
    """A block of token 0 alone has no codes; a layer with a window holds nothing before it."""
    model, codec = fitted(family)
    codec.save(tmp_path / "codec")
    ids = random_ids(1, length, 5)
    cache = cache_of(model, ids)
    PromptStore(tmp_path / "prompts", codec, block=16).save(ids, cache)
    values = [layer.values[0].transpose(0, 1).flatten(1).numpy() for layer in cache.layers]  # (held, W)
    files = list(Path(tmp_path / "prompts").rglob("*.kv"))
    assert len(files) == -(-length // 16)
    for data in (file.read_bytes() for file in files):
        start = int.from_bytes(data[72:76], "little")
        tokens, states = read_block(data, tmp_path / "codec")
        assert tokens.tolist() == ids[0, start : start + len(tokens)].tolist()
        for own, exact in zip(states, values, strict=True):
            first = start + len(tokens) - len(own) - (length - len(exact))  # row of the cache that the layer's first is
            other = exact[first : first + len(own)]
            error = np.linalg.norm(own[:, -other.shape[1] :] - other)
            assert error <= 0.1 * np.linalg.norm(other)


def test_the_vector_of_the_page(read_block):
    """Other readers are checked with it: it changes only with the format, and then knowingly."""
    written = [block.body for block in blocks(PAGE) if block.kind == "text"][-2:]
    data = bytes.fromhex(written[0].replace("\n", ""))
    expected = np.array([[float(number) for number in line.split()] for line in written[1].splitlines()])
    folder = Path(__file__).parents[2] / "docs" / "guides" / "block"
    _, states = read_block(data, folder)
    assert np.abs(states[1] - expected).max() <= 5e-6  # five digits are printed
    codec = load_codec(folder)
    block = format.unpack(data, codec.widths, len(codec.chain.coder.runs))
    own = list(codec.decoder.layers([block], len(expected), torch.device("cpu")))
    assert np.abs(own[1].numpy() - expected).max() <= 2e-5  # the package decodes in float32
