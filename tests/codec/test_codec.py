"""Caches to bytes and back: what is exact, what is close, what is refused; the format; bytes that were altered."""

import contextlib
import dataclasses
import hashlib
import resource
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MllamaTextConfig, StaticCache, T5Config

import crosslayer
from crosslayer.codec import entropy, format
from crosslayer.codec.chain import sources, step_sizes
from crosslayer.codec.codec import FILE, Codec, load_codec
from crosslayer.codec.entropy import Coder, quantized
from crosslayer.codec.fingerprint import model_print, tokenizer_print
from crosslayer.codec.fit import fit_chain, with_step
from crosslayer.codec.format import read_header, unpack_file
from crosslayer.codec.states import CodedLayer, check_config, read_shapes, turned
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.bytelevel import byte_level
from tests.helpers.codecs import cache_of, calibrated, fitted, random_ids
from tests.helpers.tiny import tiny

FAMILIES = ("llama", "mistral", "qwen3", "gemma3_text", "phi", "cohere", "granite", "opt", "gpt_oss")
FAR = CodedLayer(heads=2, key=8, value=8, window=None, angles=(1.0, 0.1, 0.01), order="halves")


def errors(cache, back) -> list[float]:
    """Return the largest relative error of keys and values in each layer."""
    found = []
    for own, other in zip(cache.layers, back.layers, strict=True):
        pairs = (own.keys, other.keys), (own.values, other.values)
        found.append(max(float((one - two).norm() / one.norm()) for one, two in pairs))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_comes_back_close_and_smaller(family):
    model, codec = fitted(family)
    ids = random_ids(2, 40, 5)
    cache = cache_of(model, ids)
    data = codec.encode(cache, ids, block=16)
    back = codec.decode(data)
    fixed = 2 * 3 * (400 + 40 * len(codec.chain.coder.runs))  # of six blocks: headers, and a table for each class
    assert len(data) < 0.35 * 2 * 40 * 2 * sum(codec.widths) + fixed
    assert max(errors(cache, back)) < 0.15
    for own, other in zip(cache.layers, back.layers, strict=True):
        assert type(own) is type(other) and own.keys.shape == other.keys.shape
        assert own.get_seq_length() == other.get_seq_length() == 40
        assert own.get_mask_sizes(3) == other.get_mask_sizes(3)
    more = random_ids(2, 3, 7)
    with torch.no_grad():
        expected = model(more, **{CACHE: cache}).logits
        assert float((model(more, **{CACHE: back}).logits - expected).std() / expected.std()) < 0.05


def test_a_step_that_16_bit_matrices_cannot_hold_becomes_coarser():
    _, calibration = calibrated()
    scale = 2000.0  # of states as small as this, the step of a channel needs numbers beyond 65,504
    states, metric = [own / scale for own in calibration.states], [own * scale**2 for own in calibration.metric]
    chain = fit_chain(dataclasses.replace(calibration, states=states, metric=metric), 0.02)
    assert 65_000 < max(float(layer.down.abs().max()) for layer in chain.layers) <= 65_504


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_tokens_decode_alone_whatever_the_blocks(family):
    """Blocks are encoded eight at a time, so 40 tokens in blocks of two are three times."""
    model, codec = fitted(family)
    ids = random_ids(1, 40, 5)
    cache = cache_of(model, ids)
    expected = codec.decode(codec.encode(cache, ids, block=40))
    for size in (2, 3, 16):
        for own, other in zip(codec.decode(codec.encode(cache, ids, block=size)).layers, expected.layers, strict=True):
            torch.testing.assert_close(own.keys, other.keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own.values, other.values, rtol=1e-5, atol=1e-5)


def test_a_finer_step_has_smaller_errors():
    model, calibration = calibrated()
    ids = random_ids(1, 40, 5)
    cache, worst = cache_of(model, ids), []
    for step in (0.08, 0.02, 0.005):
        codec = Codec(fit_chain(calibration, step), "model")
        worst.append(max(errors(cache, codec.decode(codec.encode(cache, ids)))))
    assert worst[0] > 2 * worst[1] > 4 * worst[2]


def test_the_first_token_is_exact_to_16_bits():
    model, codec = fitted()
    ids = random_ids(1, 20, 5)
    cache = cache_of(model, ids)
    for own, other in zip(cache.layers, codec.decode(codec.encode(cache, ids)).layers, strict=True):
        torch.testing.assert_close(other.keys[:, :, 0], own.keys[:, :, 0], rtol=2**-10, atol=1e-6)  # float16
        torch.testing.assert_close(other.values[:, :, 0], own.values[:, :, 0], rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "copies"),
    [("llama", 3), ("opt", 0), ("gemma3_text", 0)],  # learned positions; a window that does not hold token 0 any more
)
def test_repetitions_of_the_first_token_have_its_states(family, copies):
    model, codec = fitted(family)
    ids = random_ids(1, 40)
    ids[0, :4] = ids[0, 5] = ids[0, 0]  # the sixth token sees others, too
    cache = cache_of(model, ids)
    data = codec.encode(cache, ids)
    assert read_header(unpack_file(data)[0][1][0]).copies == copies
    exact = slice(0, 1 + copies)
    for own, other in zip(cache.layers, codec.decode(data).layers, strict=True):
        if own.get_seq_length() == own.keys.shape[2]:
            keys, values = own.keys[:, :, exact], own.values[:, :, exact]
            float16 = 2**-10 * float(keys.abs().max())  # before rotation, which mixes channels
            torch.testing.assert_close(other.keys[:, :, exact], keys, rtol=0, atol=float16)
            torch.testing.assert_close(other.values[:, :, exact], values, rtol=2**-9, atol=1e-5)
    two = codec.decode(codec.encode(cache, ids, block=2))  # blocks with nothing but copies
    assert max(errors(cache, two)) < 0.15


def test_blocks_decode_to_what_one_block_does():
    model, codec = fitted()
    ids = random_ids(1, 40, 5)
    cache = cache_of(model, ids)
    whole, cut = (codec.decode(codec.encode(cache, ids, block=size)) for size in (64, 7))
    assert max(errors(whole, cut)) < 1e-5  # tokens do not depend on each other: rounding of float32


def test_rows_with_padding_on_the_left_are_coded_without_it():
    model, codec = fitted()
    ids, mask = random_ids(2, 30, 5), torch.ones(2, 30, dtype=torch.long)
    mask[1, :6] = 0
    cache = cache_of(model, ids, mask)
    back = codec.decode(codec.encode(cache, ids, mask))
    alone = cache_of(model, ids[1:, 6:])
    single = codec.decode(codec.encode(alone, ids[1:, 6:]))
    for own, other in zip(back.layers, single.layers, strict=True):
        assert float(own.keys[1, :, :6].abs().max()) == 0
        torch.testing.assert_close(own.keys[1:, :, 6:], other.keys, rtol=1e-3, atol=1e-3)  # some code may round up


def test_dtypes_are_kept():
    model, codec = fitted()
    ids = random_ids(1, 20, 5)
    cache = cache_of(model, ids)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    data = codec.encode(cache, ids)
    assert codec.decode(data).layers[0].keys.dtype == torch.bfloat16
    assert codec.decode(data, dtype=torch.float32).layers[0].keys.dtype == torch.float32


def test_keys_turn_back_exactly_and_as_the_equation_says():
    keys = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    for order in ("halves", "pairs"):
        shape = CodedLayer(**{**vars(FAR), "order": order})
        out = turned(keys, 3, shape)
        torch.testing.assert_close(turned(out, 3, shape, back=True), keys, rtol=1e-6, atol=1e-6)
        one, other = (1, 4) if order == "halves" else (2, 3)
        angle = torch.tensor((3 + 4) * 0.1)
        expected = keys[4, :, one] * angle.cos() - keys[4, :, other] * angle.sin()
        torch.testing.assert_close(out[4, :, one], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(out[..., 6:], keys[..., 6:])


def test_a_layer_is_predicted_by_the_nearest_two_that_hold_its_tokens():
    windows = (None, 8, 8, 16, None, 8)
    shapes = [CodedLayer(**{**vars(FAR), "window": window}) for window in windows]
    assert sources(shapes) == [(), (0,), (0, 1), (0,), (0,), (3, 4)]


def test_a_step_may_be_changed_after_the_fit():
    model, calibration = calibrated()
    chain = fit_chain(calibration, 0.02)
    coarse = with_step(chain, calibration, 4.0)
    held_out = calibration.held_out
    assert coarse.bytes_per_token(*held_out) < 0.7 * chain.bytes_per_token(*held_out)


def test_codes_of_all_layers_come_back_whatever_their_tokens():
    generator = np.random.default_rng(0)
    classes = [torch.tensor([0, 0, 7, 30]), torch.tensor([7, 53]), torch.tensor([0, 7, 7])]
    coder = Coder(classes)
    for counts in ((5, 5, 5), (8, 0, 3), (0, 0, 0), (1, 300, 2)):
        codes = [
            generator.integers(-3, 4, (len(own), count)).astype(np.int16)
            for own, count in zip(classes, counts, strict=True)
        ]
        codes[1][1, :1], codes[0][3, :2] = 32767, -32767
        parts = coder.encode(codes)
        assert len(parts) == 4
        wide = [np.zeros((len(own), 400), np.int16) for own in classes]
        coder.decode(parts, [own[:, 50 : 50 + count] for own, count in zip(wide, counts, strict=True)])
        for own, other, count in zip(codes, wide, counts, strict=True):
            assert np.array_equal(own, other[:, 50 : 50 + count])
            assert not other[:, :50].any() and not other[:, 50 + count :].any()
    for wrong in ((1, 299, 2), (1, 400, 2), (1, 0, 2)):
        with pytest.raises(ValueError, match="codes|pages"):
            coder.decode(parts, [own[:, :count] for own, count in zip(wide, wrong, strict=True)])
    with pytest.raises(ValueError, match="codes|pages"):
        coder.decode([part[:-1] for part in parts], [own[:, :count] for own, count in zip(wide, counts, strict=True)])


def test_codes_take_about_the_bytes_of_their_entropy():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4096, 64, generator=generator) * torch.linspace(0.2, 3, 64)
    codes = quantized(z).to(torch.int16).T.numpy()
    classes, _ = entropy.fitted(z)
    size = sum(map(len, Coder([classes.sort().values]).encode([codes])))
    counts = [np.unique(own, return_counts=True)[1] / 4096 for own in codes]
    expected = sum(-(own * np.log2(own)).sum() for own in counts) * 4096 / 8
    assert size < 1.02 * expected


def test_a_code_is_decoded_to_the_mean_of_its_channel():
    z = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.5, 3, 40])
    codes = quantized(z)
    assert torch.equal(codes, z.sign() * (z.abs() + 0.4).floor())
    classes, shift = entropy.fitted(z)
    for channel in range(3):
        own, code = z[:, channel].abs(), codes[:, channel].abs()
        assert float(shift[channel]) == pytest.approx(float((own - code)[code > 0].mean()), abs=1e-4)
        assert classes[channel] == round(2 * (np.log2(float(code.mean())) + 12))
    assert float(shift[2]) == pytest.approx(0.1, abs=0.01)  # the middle of a cell, where cells are narrow


def test_a_codec_is_saved_and_loaded(tmp_path):
    model, codec = fitted()
    codec.save(tmp_path)
    loaded = load_codec(tmp_path, model)
    assert loaded.id == codec.id
    ids = random_ids(1, 20, 5)
    cache = cache_of(model, ids)
    assert loaded.encode(cache, ids) == codec.encode(cache, ids)
    tensors = load_file(tmp_path / FILE)
    tensors.pop("layers.1.up")
    save_file(tensors, tmp_path / FILE, metadata={"crosslayer_codec": '{"version": 4}'})
    with pytest.raises(ValueError, match="codec again"):
        load_codec(tmp_path)
    save_file(tensors, tmp_path / FILE, metadata={"crosslayer_codec": '{"version": 3}'})
    with pytest.raises(ValueError, match="be 4, got 3"):
        load_codec(tmp_path)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="codec again"):
        load_codec(tmp_path)
    with pytest.raises(ValueError, match="fit-codec"):
        load_codec(tmp_path / "none")


def test_another_model_is_refused():
    model, codec = fitted()
    codec.check(model)
    codec.check(tiny("llama").bfloat16())
    changed = tiny("llama").float()
    with torch.no_grad():
        next(changed.parameters()).view(-1)[17] += 0.25
    with pytest.raises(ValueError, match="different weights"):
        codec.check(changed)
    with pytest.raises(ValueError, match="RoPE"):
        codec.check(tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}).float())
    with pytest.raises(ValueError, match="tokenizer"):
        own = Codec(codec.chain, codec.model_print, tokenizer_print(byte_level(size=400)))
        own.check(model, byte_level(size=300))
    assert model_print(tiny("llama").bfloat16()) == model_print(tiny("llama").float())


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek_v3", {}, "MLA"),
        ("qwen3_next", {}, "layer 0"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("gemma3n_text", {}, "share"),
    ],
)
def test_models_that_no_codec_knows_are_refused(family, changes, reason):
    if family == "gemma3n_text":
        model = tiny("gemma3_text").float()
        model.config.num_kv_shared_layers = 1
        model.config.kv_sharing_modes = [None, None, "reuse"]
    else:
        model = tiny(family, **changes).float()
    with pytest.raises(ValueError, match=reason):
        read_shapes(model)


@pytest.mark.parametrize("config", [T5Config(), MllamaTextConfig()])
def test_models_with_cross_attention_are_refused(config):
    with pytest.raises(ValueError, match="cross-attention"):
        check_config(config)


CHOOSING = {"name": "shared_choice", "groups": [[1, 2]], "tokens": 10, "sinks": 1, "window": 2, "least": 0}


@pytest.mark.parametrize("method", [{"name": "cla"}, {"name": "svformer"}, CHOOSING])
def test_models_of_this_package_that_share_or_choose_are_refused(method):
    model = crosslayer.convert(tiny("llama"), method).model.float()
    with pytest.raises(ValueError, match="share|choose"):
        read_shapes(model)


def test_a_model_of_this_package_without_sharing_is_coded():
    model = crosslayer.convert(tiny("llama"), {"name": "resformer"}).model.float()
    assert [(shape.heads, shape.key, len(shape.angles)) for shape in read_shapes(model)] == [(2, 8, 4)] * 3


def test_caches_that_do_not_fit_are_refused():
    model, codec = fitted()
    ids = random_ids(1, 20, 5)
    cache = cache_of(model, ids)
    with pytest.raises(ValueError, match="21 tokens, got 20"):
        codec.encode(cache, random_ids(1, 21))
    with pytest.raises(ValueError, match="rows"):
        codec.encode(cache, random_ids(2, 20))
    with pytest.raises(ValueError, match="on the left"):
        codec.encode(cache, ids, torch.tensor([[1] * 19 + [0]]))
    static = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(ids, **{CACHE: static})
    with pytest.raises(ValueError, match="StaticLayer"):
        codec.encode(static, ids)
    other, windowed = fitted("mistral")
    advanced = cache_of(other, random_ids(1, 30, 5))
    with pytest.raises(ValueError, match="sliding"):
        windowed.encode(advanced, random_ids(1, 20, 5))


def test_bytes_of_another_codec_are_refused():
    model, codec = fitted()
    _, other = fitted("llama", 0.04)
    ids = random_ids(1, 20, 5)
    data = codec.encode(cache_of(model, ids), ids)
    with pytest.raises(ValueError, match="a different codec"):
        other.decode(data)


@pytest.mark.parametrize("count", [3_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_altered_blocks_are_errors_and_allocate_no_more_than_their_header_says(count):
    model, codec = fitted()
    ids = random_ids(1, 24, 5)
    data = bytearray(codec.encode(cache_of(model, ids), ids, block=8))
    clean, generator = bytes(data), np.random.default_rng(0)
    codec.decode(clean)
    first, classes = int.from_bytes(clean[20:24], "little"), len(codec.chain.coder.runs)
    tracemalloc.start()
    for _ in range(count):
        broken = bytearray(clean)
        kind = generator.integers(4)
        if kind == 0:
            broken = broken[: generator.integers(len(broken))]
        elif kind == 1:
            broken += bytes(generator.integers(0, 256, generator.integers(1, 40), dtype=np.uint8))
        else:
            for at in generator.integers(0, len(broken), kind):
                broken[at] ^= 1 << generator.integers(8)
        if bytes(broken) == clean:
            continue
        with pytest.raises(ValueError):
            codec.decode(bytes(broken))
        block = bytes(broken[24 : 24 + first])
        if block != clean[24 : 24 + first]:
            with pytest.raises(ValueError):
                format.unpack(block, codec.widths, classes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(clean) + 2**20


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_altered_codes_with_a_right_hash_decode_to_something_or_are_an_error(count):
    """Also what a kernel would get; and memory does not grow with the blocks."""
    model, codec = fitted()
    ids = random_ids(1, 8, 5)
    (_, [block]), generator = format.unpack_file(codec.encode(cache_of(model, ids), ids))[0], np.random.default_rng(0)
    clean, before = bytes(block[: -format.HASH]), 0
    for number in range(count):
        broken = bytearray(clean)
        for at in generator.integers(0, len(broken), generator.integers(1, 4)):
            broken[at] = generator.integers(256)
        packed = bytes(broken) + hashlib.sha256(broken).digest()
        with contextlib.suppress(ValueError):
            cache = codec.decode(format.pack_file([(0, [packed])]))
            assert cache.get_seq_length() == 8 and step_sizes(torch.tensor([0, 255], dtype=torch.uint8)).max() < 256
        with contextlib.suppress(ValueError):
            own = format.unpack(packed, codec.widths, len(codec.chain.coder.runs))
            codec.decoder.pages.prepare(
                [own.parts], [codec.decoder.coded(own)], [own.stop - own.start], torch.device("cpu")
            )
        if number == count // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= before + 20 * 1024
