"""A store within its limit, on a full disk, out of reach, and with very many prompts that begin alike."""

import errno
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from crosslayer.codec import format
from crosslayer.codec.files import Files
from crosslayer.codec.index import FILE
from crosslayer.codec.store import PromptStore
from tests.codec.test_store import blocks, opened, saved
from tests.helpers.codecs import cache_of, random_ids

BLOCK, WIDTHS = 16, [2]


@dataclass
class BareCodec:
    """A codec whose blocks hold nothing but their tokens, so that thousands are written in seconds."""

    id: bytes = bytes(32)
    widths = WIDTHS
    chain = SimpleNamespace(coder=SimpleNamespace(runs=[0]))

    def encode_blocks(self, states, tokens, start, parent, size, dtype):
        for at in range(start, len(tokens), size):
            text = tokens[at : at + size]
            facts = format.child(parent, text), parent, at, text, np.zeros(1, np.uint16), dtype, 0
            exact = bytes(4) if at == 0 else b""
            yield format.Block(*facts, np.zeros(len(text), np.uint8), exact, [bytes(100)])
            parent = format.child(parent, text)


def bare(folder, **options) -> PromptStore:
    return PromptStore(folder, BareCodec(), block=BLOCK, **options)  # type: ignore[arg-type]


def put(store: PromptStore, tokens: np.ndarray) -> int:
    return store.save_states(tokens, [torch.zeros(len(tokens), 2)], 0)


def text_of(*numbers: int, length: int = 48) -> np.ndarray:
    """Return tokens that follow from numbers: texts share as many blocks as their numbers are equal."""
    parts = [np.random.default_rng(numbers[: index + 1]).integers(1, 1000, BLOCK) for index in range(len(numbers))]
    return np.concatenate(parts).astype(np.uint32)[:length]


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in blocks(folder))


def unreachable(store: PromptStore) -> list[str]:
    """Return the blocks whose parent is not stored."""
    entries = store.files.entries()
    names = {entry.name for entry in entries} | {format.root(store.codec.id).hex()[:32]}
    return [entry.path for entry in entries if entry.parent not in names]


@pytest.mark.parametrize("steps", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_saves_and_loads(tmp_path, steps):
    """Nothing that is stored is out of reach, and what was saved last loads if it fits the limit."""
    generator = np.random.default_rng(0)
    one = put(probe := bare(tmp_path / "probe"), text_of(1)) and size_of(probe.files.folder)
    limit = 25 * one + 7
    store = bare(tmp_path / "store", limit=limit)
    texts = 0
    for step in range(steps):
        numbers = generator.integers(0, 3, generator.integers(1, 5)).tolist()
        text = text_of(*numbers, length=int(generator.integers(1, BLOCK * len(numbers) + 1)))
        if generator.random() < 0.5:
            assert put(store, text) <= len(text)
            assert store.match(text) == len(text)
            texts += 1
        else:
            store._use(store._read(text)[0])
        if step % 500 == 0:
            assert not unreachable(store) and size_of(tmp_path / "store") <= limit
    assert texts > 0.4 * steps and not unreachable(store)
    assert 0.8 * limit < size_of(tmp_path / "store") <= limit


def test_a_prefix_that_others_wrote_counts_as_used(tmp_path):
    """320 tokens of which 256 were stored earlier, and a limit one block short: the other text goes, not the prefix."""
    model, store = opened(tmp_path)
    ids, other = random_ids(1, 320, 5), random_ids(1, 64, 6)
    store.save(ids[:, :256], cache_of(model, ids[:, :256]))
    store.save(other, cache_of(model, other))
    store.save(ids, cache_of(model, ids))
    whole = size_of(tmp_path)
    short = max(path.stat().st_size for path in blocks(tmp_path))
    for path in blocks(tmp_path):
        path.unlink()
    _, store = opened(tmp_path, limit=whole - short)
    store.save(ids[:, :256], cache_of(model, ids[:, :256]))
    store.save(other, cache_of(model, other))
    assert store.save(ids, cache_of(model, ids)) == 64
    assert store.load(ids, model)[1] == 319
    assert store.load(other, model)[1] < 63


@pytest.mark.parametrize("remote", [False, True])
def test_parents_stay_while_a_block_behind_them_does(tmp_path, remote):
    """One byte over the limit costs the last block of the oldest text, also where no times of use are kept."""
    url = f"memory://{tmp_path.name}" if remote else str(tmp_path / "store")
    store = bare(url)
    first, second = text_of(1, 2, 3, 4, length=64), text_of(5, 6, 7, 8, length=64)
    put(store, first)
    time.sleep(0.01)
    put(store, second)
    total = sum(entry.size for entry in store.files.entries())
    store.limit = total + max(entry.size for entry in store.files.entries()) - 1
    time.sleep(0.01)
    put(store, text_of(9))
    assert store.match(first) == 48 and store.match(second) == 64 and store.match(text_of(9)) == 16
    assert not unreachable(store)


def test_a_limit_below_one_text_is_said(tmp_path):
    store = bare(tmp_path / "probe")
    put(store, text_of(1))
    one = size_of(tmp_path / "probe")
    small = bare(tmp_path / "small", limit=2 * one + 10)
    with pytest.warns(UserWarning, match="limit"):
        assert put(small, text_of(1, 2, 3)) == 32
    assert small.match(text_of(1, 2, 3)) == 32
    with pytest.warns(UserWarning, match="limit"):
        assert put(bare(tmp_path / "none", limit="1KB"), np.arange(400, dtype=np.uint32)) < 100


def test_a_full_disk_makes_room_and_recovers(tmp_path, monkeypatch):
    store = bare(tmp_path, limit="1MB")
    put(store, text_of(1, 2, 3))
    most, write = size_of(tmp_path) + 50, Files.write

    def limited(files, path, data):
        if size_of(tmp_path) + len(data) > most:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(files, path, data)

    monkeypatch.setattr(Files, "write", limited)
    for number in range(10, 20):
        assert put(store, text_of(number, 2)) == 32
        assert store.match(text_of(number, 2)) == 32 and not unreachable(store)
    store.limit = None  # nothing may be removed
    with pytest.warns(UserWarning, match="space"):
        assert put(store, text_of(50, 2)) < 32


class Cloud(MemoryFileSystem):
    """A file system whose client raises errors of its own, which are no OSError, while it is out of reach."""

    protocol, store, pseudo_dirs, is_down = "cloudtest", {}, [""], False

    def ls(self, path, *rest, **more):
        self.check()
        return super().ls(path, *rest, **more)

    def cat_file(self, path, *rest, **more):
        self.check()
        return super().cat_file(path, *rest, **more)

    def pipe_file(self, path, *rest, **more):
        self.check()
        return super().pipe_file(path, *rest, **more)

    def check(self):
        if Cloud.is_down:
            raise type("EndpointConnectionError", (Exception,), {})("Could not connect to the endpoint URL")


def test_a_store_out_of_reach_is_a_miss(monkeypatch):
    fsspec.register_implementation("cloudtest", Cloud, clobber=True)
    model, store = opened("cloudtest://bucket/prompts", limit="1MB")
    ids = random_ids(1, 60, 5)
    cache = cache_of(model, ids)
    store.save(ids, cache)
    assert store.load(ids, model)[1] == 59
    monkeypatch.setattr(Cloud, "is_down", True)
    assert store.match(ids[0].numpy().astype(np.uint32)) == 0
    other, columns = store.load(ids, model)
    assert columns == 0 and other.get_seq_length() == 0
    with pytest.warns(UserWarning, match="written"):
        assert store.save(ids, cache) == 0
    with pytest.raises(OSError, match="Could not connect"):
        store.files.entries()
    monkeypatch.setattr(Cloud, "is_down", False)
    assert store.load(ids, model)[1] == 59


@pytest.mark.parametrize("remote", [False, True])
def test_each_of_forty_users_finds_the_own_turn(tmp_path, remote):
    store = bare(f"memory://{tmp_path.name}" if remote else tmp_path)
    shared = text_of(0)
    for start in (np.empty(0, np.uint32), shared):
        turns = [np.concatenate([start, text_of(100 + user)[:11]]) for user in range(40)]
        for turn in turns:
            put(store, turn)
        for again in (store, bare(store.files.url)):
            assert [again.match(np.append(turn, [5, 6])) for turn in turns] == [len(turn) for turn in turns]
    best = np.concatenate([shared, text_of(107)[:9], [1001, 1002]]).astype(np.uint32)
    assert store.match(best) == BLOCK + 9  # the most that any sibling has in common


def test_the_longest_prefix_is_exact_among_random_siblings(tmp_path):
    generator = np.random.default_rng(1)
    store, stored = bare(tmp_path), []
    for _ in range(200):
        stored.append(generator.integers(1, 3, generator.integers(1, BLOCK)).astype(np.uint32))
        put(store, stored[-1])
    for _ in range(200):
        text = generator.integers(1, 3, 14).astype(np.uint32)
        common = [int(np.cumprod(own[:14] == text[: len(own)]).sum()) for own in stored]
        assert store.match(text) == max(common)


def test_ten_thousand_siblings_cost_at_most_twice_what_ten_cost(tmp_path):
    """The rows are put into the index alone, without files; the returning user's own are stored."""
    times = {}
    for count in (10, 10_000):
        store = bare(tmp_path / str(count))
        put(store, text_of(7)[:11])
        root, generator = format.root(store.codec.id), np.random.default_rng(3)
        siblings = (generator.integers(1000, 2**31, 11).astype(np.uint32) for _ in range(count))
        rows = [format.Block(format.child(root, own), root, 0, own, np.zeros(1), 0) for own in siblings]
        store.index.add(rows)
        text, own = np.append(text_of(7)[:11], [5, 6]).astype(np.uint32), []
        for _ in range(50):
            begin = time.perf_counter()
            assert store.match(text) == 11
            own.append(time.perf_counter() - begin)
        times[count] = min(own)
    assert times[10_000] < 2 * times[10], times


def test_an_index_that_is_lost_damaged_or_stale_costs_nothing(tmp_path):
    store, turns = bare(tmp_path), [text_of(100 + user)[:11] for user in range(20)]
    for turn in turns:
        put(store, turn)
    index = tmp_path / FILE

    def found() -> int:
        return sum(bare(tmp_path).match(np.append(turn, [5, 6])) == 11 for turn in turns)

    assert index.stat().st_mode & 0o777 == 0o600 and found() == 20
    index.unlink()
    assert found() == 20
    index.write_bytes(b"no database" * 1000)
    assert found() + found() >= 39  # the first look-up meets the damage
    paths = blocks(tmp_path)
    for path in paths[:5]:
        path.unlink()
    assert found() == 15


def test_a_damaged_file_beside_a_good_block_does_not_remove_it(tmp_path):
    model, store, ids = saved(tmp_path)
    first = next(path for path in blocks(tmp_path) if path.read_bytes()[72:76] == bytes(4))
    data = first.read_bytes()
    damaged = Path(f"{str(first)[:-11]}00000000.kv")  # the good block's bytes, cut off, under a name of its own
    damaged.write_bytes(data[:-40])
    (tmp_path / FILE).unlink()
    text = torch.cat([ids[:, :12], random_ids(1, 10, 9)], 1)
    for _ in range(3):
        assert store.load(ids, model)[1] == 59 and store.load(text, model)[1] == 12
        assert first.read_bytes() == data


def test_rows_that_an_index_cannot_forget_do_not_hold_a_look_up(tmp_path, monkeypatch):
    store = bare(tmp_path)
    for user in range(4):
        put(store, text_of(100 + user)[:11])
    for path in blocks(tmp_path):
        path.unlink()
    monkeypatch.setattr(store.index, "remove", lambda names: None)
    assert store.match(np.append(text_of(102)[:11], [5, 6]).astype(np.uint32)) == 0


def test_a_store_for_reading_alone_is_read(tmp_path):
    """Its index cannot be made or changed: the process uses one of its own."""
    store, turns = bare(tmp_path), [text_of(100 + user)[:11] for user in range(20)]
    for turn in turns:
        put(store, turn)
    (tmp_path / FILE).unlink()
    reader = bare(tmp_path)
    reader.index._separate()
    assert [reader.match(np.append(turn, [5, 6])) for turn in turns] == [11] * 20
    assert not (tmp_path / FILE).exists()
