"""The kernel that reads stored codes, in Triton's interpreter, against the library that wrote them."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("constriction")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from crosslayer.codec import streams  # noqa: E402
from crosslayer.codec.entropy import Coder, all_tables  # noqa: E402
from crosslayer.codec.streams import Streams  # noqa: E402
from crosslayer.core.kernels import ans  # noqa: E402
from tests.helpers.codecs import cache_of, fitted, random_ids  # noqa: E402

CPU = torch.device("cpu")


def coders(count: int) -> list[Coder]:
    """Coders of few channels, whose classes are any."""
    generator = np.random.default_rng(count)
    return [Coder(all_tables(), sorted(generator.choice(240, 4).tolist())) for _ in range(count)]


def parts_of(coder: Coder, counts: tuple[int, ...]) -> list[tuple[bytes, int]]:
    """Encode random codes, including some that are too large for every table."""
    generator = np.random.default_rng(sum(counts))
    parts = []
    for count in counts:
        codes = generator.integers(-3, 4, (coder.channels, count))
        codes[1, 1:2], codes[3, :1] = 30000, -9999
        parts.append((coder.encode(codes), count))
    return parts


def test_all_streams_are_read_as_one_by_one():
    own = coders(3)
    layers = [parts_of(coder, counts) for coder, counts in zip(own, [(5, 0, 3), (4,), (0,)], strict=True)]
    found = Streams(own).read_at_once(layers, CPU, ans)
    for coder, parts, coefficients in zip(own, layers, found, strict=True):
        assert np.array_equal(coefficients.numpy(), coder.decode_parts(parts))


def test_damaged_codes_stay_within_their_bytes():
    """Whatever they hold: they decode to other numbers, or are refused where too few or too many codes escape."""
    (coder,) = coders(1)
    ((data, count),) = parts_of(coder, (6,))
    with pytest.raises(ValueError, match="escaped"):
        Streams([coder]).read_at_once([[(data + b"\0\0", count)]], CPU, ans)
    with pytest.raises(ValueError, match="cut off"):
        Streams([coder]).read_at_once([[(data[:-1], count)]], CPU, ans)
    for at in range(4, len(data), 5):
        damaged = data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]
        try:
            (found,) = Streams([coder]).read_at_once([[(damaged, count)]], CPU, ans)
        except ValueError:
            with pytest.raises(ValueError):
                coder.decode(damaged, count)
        else:
            assert np.array_equal(found.numpy(), coder.decode(damaged, count))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cache_is_the_one_that_a_cpu_decodes(family, monkeypatch):
    model, codec = fitted(family)
    ids = random_ids(1, 24)
    data = codec.encode(cache_of(model, ids), ids, block=16)
    expected = codec.decode(data)
    monkeypatch.setattr(streams, "triton_kernels", lambda name, device: ans)
    monkeypatch.setattr(streams, "MOST", 3 * max(codec.chain.layers[0].coder.channels, 1) * 24)  # several launches
    for own, other in zip(codec.decode(data).layers, expected.layers, strict=True):
        assert torch.equal(own.keys, other.keys) and torch.equal(own.values, other.values)
