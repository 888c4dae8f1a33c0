"""A store of prompts: prefixes, shared blocks, damage, eviction, several processes, and processes that are killed."""

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import crosslayer
from crosslayer.codec import format
from crosslayer.codec.files import prune
from crosslayer.codec.store import PromptStore
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.codecs import cache_of, fitted, random_ids

BLOCK = 16


def opened(url, family: str = "llama", **options) -> tuple:
    model, codec = fitted(family)
    return model, PromptStore(url, codec, block=BLOCK, **options)


def saved(url, length: int = 60, family: str = "llama", **options) -> tuple:
    model, store = opened(url, family, **options)
    ids = random_ids(1, length, 5)
    assert store.save(ids, cache_of(model, ids)) == length
    return model, store, ids


def blocks(folder) -> list[Path]:
    return sorted(Path(folder).rglob("*.kv"))


@pytest.mark.parametrize("remote", [False, True])
def test_the_longest_prefix_comes_back(tmp_path, remote):
    url = f"memory://{tmp_path.name}" if remote else str(tmp_path / "prompts")
    model, store, ids = saved(url)
    for length, expected in ((60, 59), (90, 60), (40, 39), (17, 16), (2, 1)):
        text = torch.cat([ids, random_ids(1, 40, 9)], 1)[:, :length]
        cache, columns = store.load(text, model)
        assert columns == cache.get_seq_length() == expected
        exact = cache_of(model, text[:, :columns])
        assert float((cache.layers[2].values - exact.layers[2].values).norm() / exact.layers[2].values.norm()) < 0.05
    assert store.load(random_ids(1, 30, 8), model)[1] == 0
    other = ids.clone()
    other[0, 37] = 3 + (other[0, 37] - 2) % 50  # another token
    assert store.load(other, model)[1] == 37
    assert type(store.load(other, model)[0]) is DynamicCache


def test_generation_continues_behind_the_prefix(tmp_path):
    model, store, ids = saved(tmp_path)
    cache, length = store.load(ids, model)
    output = model.generate(ids, **{CACHE: cache}, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert length == 59 and output.sequences.shape[1] <= 72
    with torch.no_grad():
        alone = model(output.sequences[:, :60]).logits[0, -1]
    assert int(alone.argmax()) == int(output.sequences[0, 60])
    before = blocks(tmp_path)
    files = [path.stat().st_ino for path in before]
    total = output.sequences.shape[1]
    assert store.save(output.sequences, output[CACHE]) == total - 1 - 60  # what was stored is not coded again
    assert [path.stat().st_ino for path in before] == files  # none was written again
    assert store.load(torch.cat([output.sequences, ids], 1), model)[1] == total - 1


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_ten_lines_with_stock_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, codec = fitted()
    codec.save("codec")
    monkeypatch.setattr(model.generation_config, "return_dict_in_generate", True)
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 8)
    ids = random_ids(1, 300, 5)

    codec = crosslayer.load_codec("codec")  # refuses other weights
    store = crosslayer.PromptStore("prompts/", codec, limit="20GiB")
    cache, length = store.load(ids, model)  # longest stored prefix as an ordinary Cache; length 0 if none
    output = model.generate(ids, past_key_values=cache)  # all ids; generate continues after `length`
    store.save(ids, output.past_key_values)

    assert length == 0 and store.load(ids, model)[1] == 299


def test_prompts_share_blocks(tmp_path):
    model, store, ids = saved(tmp_path)
    count = len(blocks(tmp_path))
    assert count == 4
    text = torch.cat([ids[:, :40], random_ids(1, 20, 9)], 1)
    assert store.save(text, cache_of(model, text)) == 60 - 32  # two blocks are shared
    assert len(blocks(tmp_path)) == count + 2
    assert store.save(text, cache_of(model, text)) == 0
    assert store.load(ids, model)[1] == store.load(text, model)[1] == 59


@pytest.mark.parametrize("first", [16, 64])
def test_two_sizes_of_blocks_share_a_store(tmp_path, first):
    model, codec = fitted()
    stores = [PromptStore(tmp_path, codec, block=size) for size in (first, 80 - first)]
    ids = random_ids(1, 200, 5)
    cache = cache_of(model, ids)
    assert stores[0].save(ids[:, :70], cache_of(model, ids[:, :70])) == 70
    assert stores[1].save(ids, cache) == 200 - 70  # what the other size stored is not coded again
    for store in stores:
        loaded, columns = store.load(torch.cat([ids, ids], 1), model)
        assert columns == 200
        error = loaded.layers[2].values - cache.layers[2].values
        assert float(error.norm() / cache.layers[2].values.norm()) < 0.05  # as with one size


def test_batches_have_the_columns_of_the_shortest_row(tmp_path):
    model, store, ids = saved(tmp_path)
    text = torch.cat([ids[:, :40], random_ids(1, 40, 9)[:, :40]], 0)
    mask = torch.ones_like(text)
    text[1, 8:], mask[1, :8] = ids[0, :32], 0
    cache, columns = store.load(text, model, mask)
    assert columns == 39 and cache.layers[0].keys.shape[:3] == (2, 2, 39)
    torch.testing.assert_close(cache.layers[0].values[1, :, 8:], cache.layers[0].values[0, :, :31])
    output = model.generate(text, attention_mask=mask, **{CACHE: cache}, max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        expected = model(ids[:, :32]).logits[0, -1].argmax()
    assert int(output[1, 40]) == int(expected)
    assert store.save(text, cache_of(model, text, mask), mask) == 0


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_are_stored_as_far_as_they_reach(tmp_path, family):
    model, store, ids = saved(tmp_path, 50, family)
    longer = torch.cat([ids, random_ids(1, 10, 9)], 1)
    cache, columns = store.load(longer, model)  # at the end the windows are held
    assert columns == 50
    exact = cache_of(model, ids)
    for own, other in zip(cache.layers, exact.layers, strict=True):
        assert own.keys.shape == other.keys.shape and own.get_seq_length() == 50
        assert own.get_mask_sizes(2) == other.get_mask_sizes(2)
        assert float((own.values - other.values).norm() / other.values.norm()) < 0.1
    assert store.load(ids[:, :30], model)[1] == 0  # windows of 8 are not stored there
    store.save(ids[:, :30], cache_of(model, ids[:, :30]))
    assert store.load(torch.cat([ids[:, :30], random_ids(1, 10, 9)], 1), model)[1] == 30
    assert store.load(longer, model)[1] == 50
    with torch.no_grad():
        store.save(longer, (cache, model(longer[:, 50:], **{CACHE: cache}))[0])
    assert store.load(torch.cat([longer, ids], 1), model)[1] == 60


def test_a_damaged_block_is_a_miss_and_is_written_again(tmp_path):
    model, store, ids = saved(tmp_path)
    whole = {path: path.read_bytes() for path in blocks(tmp_path)}
    generator = np.random.default_rng(0)
    for path, data in whole.items():
        for _ in range(20):
            broken = bytearray(data)
            broken[generator.integers(len(data))] ^= 1 << generator.integers(8)
            path.write_bytes(broken if generator.integers(2) else data[: generator.integers(len(data))])
            cache, columns = store.load(ids, model)
            assert columns in (0, 16, 32, 48)
            if columns:
                exact = cache_of(model, ids[:, :columns]).layers[1].values
                assert float((cache.layers[1].values - exact).norm() / exact.norm()) < 0.05
            assert store.save(ids, cache_of(model, ids)) == (60 - columns if columns < 48 else 12)
            assert store.load(ids, model)[1] == 59
    names = list(whole)
    names[0].write_bytes(whole[names[1]])  # a block under another's name
    assert store.load(ids, model)[1] < 59


def test_another_codec_finds_nothing_and_another_model_is_refused(tmp_path):
    model, store, ids = saved(tmp_path)
    _, other = fitted("llama", 0.04)
    assert PromptStore(tmp_path, other, block=BLOCK).load(ids, model)[1] == 0
    with pytest.raises(ValueError, match="different weights"):
        store.load(ids, fitted("qwen2")[0])
    with pytest.raises(ValueError, match="70 tokens, got 60"):
        store.save(random_ids(1, 70), cache_of(model, ids))


def test_the_blocks_used_least_recently_are_removed(tmp_path):
    model, store, ids = saved(tmp_path)
    size = sum(path.stat().st_size for path in blocks(tmp_path))
    _, limited = opened(tmp_path, limit=2 * size)
    texts = [random_ids(1, 60, seed) for seed in (21, 22, 23)]
    for text in texts:
        time.sleep(0.02)
        limited.load(ids, model)  # used all the time
        limited.save(text, cache_of(model, text))
        assert sum(path.stat().st_size for path in blocks(tmp_path)) <= 2 * size
    assert limited.load(ids, model)[1] == 59
    assert limited.load(texts[0], model)[1] == 0
    assert limited.load(texts[2], model)[1] > 0
    assert prune(store.files, 1)[0] == 0 and not blocks(tmp_path)


def test_limits(tmp_path):
    limits = [opened(tmp_path, limit=limit)[1].limit for limit in ("20GiB", "1.5 MiB", 700, "2KB")]
    assert limits == [20 * 2**30, 1572864, 700, 2000]
    for wrong in ("20 apples", "", "-1", "0", "nan"):
        with pytest.raises(ValueError, match="the limit must be"):
            opened(tmp_path, limit=wrong)


def test_files_are_for_their_user_only(tmp_path):
    os.umask(0o022)
    saved(tmp_path / "prompts")
    paths = [*blocks(tmp_path), tmp_path / "prompts", *(tmp_path / "prompts").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}


def test_a_store_that_cannot_be_written_says_so_and_loses_nothing(tmp_path, monkeypatch):
    model, store, ids = saved(tmp_path)
    text = random_ids(1, 40, 9)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="space left"):
        assert store.save(text, cache_of(model, text)) == 0
    monkeypatch.undo()
    assert store.load(ids, model)[1] == 59
    index = tmp_path / "index.sqlite3"
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file() and path != index) == blocks(tmp_path)
    with pytest.raises(ValueError, match="cannot be opened"):
        opened("nonsense://prompts")


def keep_saving(folder: Path, ready, first: int, last: int) -> None:
    torch.set_num_threads(1)
    model, store = opened(folder)
    ready.set()
    for seed in range(first, last):
        text = random_ids(1, 60, seed)
        store.save(text, cache_of(model, text))


def started(folder: Path, first: int, last: int):
    """Return a process that saves prompts, which is a copy of this one."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=keep_saving, args=(folder, ready, first, last))
    process.start()
    assert ready.wait(60)
    return process


def test_processes_share_a_store_and_one_that_is_killed_loses_nothing(tmp_path):
    model, store, ids = saved(tmp_path)
    running = [started(tmp_path, 100, 140), started(tmp_path, 120, 160)]
    for process in running:
        process.join(120)
        assert process.exitcode == 0
    for seed in (100, 119, 139, 159):
        assert store.load(random_ids(1, 60, seed), model)[1] == 59
    for attempt in range(5):
        process = started(tmp_path, 200, 100_000)
        time.sleep(0.1 + 0.03 * attempt)
        process.kill()
        process.join()
        assert store.load(ids, model)[1] == 59
        for path in blocks(tmp_path):
            format.check_hash(path.read_bytes())


def test_what_a_killed_process_left_is_removed(tmp_path):
    _, store, _ = saved(tmp_path)
    left = blocks(tmp_path)[0].parent / ".0123.kv.abcd"
    left.write_bytes(b"half")
    prune(store.files, 2**30)
    assert left.exists()  # it may still be written
    os.utime(left, (0, 0))
    prune(store.files, 2**30)
    assert not left.exists() and blocks(tmp_path)


def test_headers_say_what_is_stored_and_blocks_are_read_from_a_position(tmp_path):
    model, store, ids = saved(tmp_path)
    tokens = ids[0].numpy().astype(np.uint32)
    assert store.match(tokens) == 60 and store.match(tokens[:37]) == 37 and store.match(tokens[1:]) == 0
    assert [block.start for block in store.read(tokens, 20)] == [16, 32, 48]
    assert [block.start for block in store.read(tokens[:40])] == [0, 16, 32]
    states = list(store.codec.decoder.layers(store.read(tokens[:50], 20), 50, torch.device("cpu")))
    exact = store.codec.read(cache_of(model, ids), 0, 0, 60)
    for own, other in zip(states, exact, strict=True):
        assert float((own - other[16:50]).norm() / other[16:50].norm()) < 0.1
    with pytest.raises(ValueError, match="only 60 of 61 tokens"):
        store.read(np.append(tokens, 5))


def test_tokens_that_a_window_forgot_are_no_match(tmp_path):
    _, store, ids = saved(tmp_path, family="mistral")
    assert store.match(ids[0].numpy().astype(np.uint32)) == 0
    with pytest.raises(ValueError, match="could be read"):
        store.read(ids[0].numpy().astype(np.uint32))


def test_states_are_stored_as_a_cache_is(tmp_path):
    model, store, ids = saved(tmp_path / "one")
    _, other = opened(tmp_path / "other")
    states = store.codec.read(cache_of(model, ids), 0, 0, 60)
    assert other.save_states(ids[0].numpy().astype(np.uint32), states, format.DTYPES.index("float32")) == 60
    names = [[path.name for path in blocks(tmp_path / folder)] for folder in ("one", "other")]
    assert names[0] == names[1]
    assert [path.read_bytes() for path in blocks(tmp_path / "one")] == [
        path.read_bytes() for path in blocks(tmp_path / "other")
    ]


@pytest.mark.parametrize(("version", "advice"), [(1, "store the prompt again"), (99, "update crosslayer")])
def test_another_version_of_the_format_says_what_to_do(version, advice):
    model, codec = fitted()
    ids = random_ids(1, 20)
    data = bytearray(codec.encode(cache_of(model, ids), ids))
    data[4:6] = version.to_bytes(2, "little")
    with pytest.raises(format.OtherFormat, match=advice):
        codec.decode(bytes(data))
