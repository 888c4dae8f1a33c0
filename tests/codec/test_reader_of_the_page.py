"""The program in docs/guides/store.md decodes every block, also those in which some layers or classes have no codes."""

from pathlib import Path

import numpy as np
import pytest

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
