"""Every share of a cache is one of the 16-bit cache, and so the same in a run of any dtype."""

import pytest
import torch

import crosslayer
from crosslayer.wiring.kv_bits import REFERENCE_DTYPE, in_16_bits
from tests.helpers.benches import short
from tests.helpers.saved import ours, save
from tests.helpers.tiny import VOCABULARY, tiny

DTYPES = (torch.float32, torch.bfloat16)


def model(dtype, **options):
    return tiny("llama", dtype=dtype, **options)


def test_numbers_of_more_than_16_bits_count_as_16():
    assert [in_16_bits(24, item) for item in (8, 4, 2, 1)] == [6, 12, 24, 24]


def test_the_bytes_of_a_retrofit_are_those_in_16_bits():
    ids = torch.randint(3, VOCABULARY, (40, 8), generator=torch.Generator().manual_seed(0))
    options = {"method": "cla", "layers": "1-2", "compensation": "none", "windows": 16, "length": 8}
    caches = [crosslayer.retrofit(model(dtype), ids, **options).cache for dtype in DTYPES]
    assert caches[0] == caches[1]
    whole = crosslayer.plan(model(torch.float32), length=caches[0].context, dtype=REFERENCE_DTYPE).stored_bytes
    assert caches[0].bytes_per_token_before == whole / caches[0].context


def test_a_benchmark_shows_the_share_of_the_16_bit_cache_beside_what_is_allocated():
    rows = {}
    for dtype in DTYPES:
        sizes = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        one, other = (model(dtype, max_position_embeddings=512, **sizes) for _ in range(2))
        benchmark = short(one, other, 120, new_tokens=4, kv_bits="4")
        rows[dtype] = benchmark.rows_of("bytes")[0]
    wide, narrow = (rows[dtype] for dtype in DTYPES)
    assert wide.change.value == narrow.change.value == narrow.details["stored"] / narrow.details["original_stored"]
    assert (wide.value, wide.original) == (narrow.value, narrow.original)  # in 16 bits, in which the second ran
    assert wide.details["original_stored"] == 2 * narrow.details["original_stored"]


@pytest.mark.parametrize(("name", "share"), [pytest.param("vanilla", 1, marks=pytest.mark.slow), ("svformer", None)])
def test_generation_counts_the_same_share_in_every_dtype(tmp_path, name, share):
    folder = save(tiny("llama") if share else ours(name), tmp_path / "model")
    runs = [crosslayer.generate(folder, "the whale w9", max_new_tokens=5, dtype=dtype) for dtype in DTYPES]
    assert runs[0].kv_share == runs[1].kv_share and runs[0].cache_bytes == 2 * runs[1].cache_bytes
    loaded, _ = crosslayer.load_model(str(folder))
    kept = share or loaded.config.plan.cached_fraction()
    assert runs[0].kv_share == pytest.approx(kept, abs=1e-4)
