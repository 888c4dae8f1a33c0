"""Mixtures: proportions, order and rows depend only on seed and index; documents in a row are separate."""

import pickle
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from crosslayer.testing.tiny import FLOAT32, SHAPE, build, close, config_of
from crosslayer.training.rows import IGNORED, FixedRows, Mixture, evenly_spaced, permutation
from crosslayer.training.shards import tokenise
from tests.helpers.text import tokenizer, words

WEIGHTS = {"books": 5, "web": 3.5, "code": 1.5}


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Three domains of 25, 50 and 10 windows of 8 words, each with words of its own."""
    folder, inner = tmp_path_factory.mktemp("shards"), tokenizer()
    texts = {
        "books": [words(0, 205)],
        "web": [words(n, n + 5) for n in range(205, 405, 5)] * 2,
        "code": [words(405, 490)],
    }
    return {name: tokenise(text, inner, folder / name, fingerprint="") for name, text in texts.items()}


def mixture(domains, seed=0, items=1000, weights=WEIGHTS, length=8):
    return Mixture({name: FixedRows(shards, length, name) for name, shards in domains.items()}, weights, seed, items)


def windows_of(rows):
    return [rows.window(item) for item in range(len(rows))]


@pytest.mark.parametrize("seed", range(5))
def test_every_prefix_has_each_domain_in_proportion(domains, seed):
    counts = Counter()
    for done, (name, _) in enumerate(windows_of(mixture(domains, seed)), 1):
        counts[name] += 1
        assert all(abs(counts[name] - done * weight / 10) < len(WEIGHTS) for name, weight in WEIGHTS.items())


def test_proportions_are_exact_in_the_long_run(domains):
    rows, far = mixture(domains, items=10**12 + 10**4), 10**12
    for name, weight in WEIGHTS.items():
        number = next(item for item in range(far, far + 100) if rows.window(item)[0] == name)
        assert rows._domain(number)[1] == pytest.approx(far * weight / 10, abs=10**12 / 2**31)


def test_windows_come_once_each_before_any_comes_again(domains):
    rows = mixture(domains)
    numbers = {name: [window for domain, window in windows_of(rows) if domain == name] for name in WEIGHTS}
    for name, windows in {"books": 25, "web": 50, "code": 10}.items():
        epochs = [numbers[name][start : start + windows] for start in range(0, len(numbers[name]) - windows, windows)]
        assert len(epochs) > 5 and all(sorted(epoch) == list(range(windows)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs) and list(range(windows)) not in epochs
    assert rows.passes() == pytest.approx({"books": 500 / 25, "web": 350 / 50, "code": 150 / 10})


def test_the_order_follows_from_the_seed(domains):
    first = windows_of(mixture(domains))
    assert windows_of(mixture(domains)) == first != windows_of(mixture(domains, seed=1))
    assert windows_of(mixture(domains, items=100)) == first[:100]
    assert first[:6] == [("code", 7), ("books", 19), ("web", 31), ("books", 21), ("web", 25), ("books", 6)]


def test_the_order_of_a_domain_is_its_own(domains):
    """Other weights, or another domain, change when a window comes, and not which comes next."""
    rows, pair = mixture(domains), {name: domains[name] for name in ("code", "web")}
    other = mixture(pair, weights={"web": 1, "code": 3})
    for name in pair:
        expected, windows = ([window for domain, window in windows_of(r) if domain == name] for r in (rows, other))
        both = min(len(expected), len(windows))
        assert expected[:both] == windows[:both]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_an_order_has_everything_once(size):
    orders = [tuple(permutation(size, key).tolist()) for key in range(8)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(set(orders)) > (1 if size > 1 else 0)


def test_orders_look_random():
    """Each number is at each index about equally often: χ² of 16 × 16 over 1,000 orders; 99.9% are below 294."""
    counts = torch.zeros(16, 16)
    for key in range(1000):
        counts[range(16), permutation(16, key).tolist()] += 1
    assert ((counts - 62.5) ** 2 / 62.5).sum() < 294


def test_rows_are_the_same_for_any_number_of_processes(domains):
    rows = mixture(domains, items=24)
    expected = torch.stack([rows[item]["input_ids"] for item in range(24)])
    for workers in (0, 2):
        batches = list(DataLoader(rows, batch_size=4, num_workers=workers))
        assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), expected)
    copy = pickle.loads(pickle.dumps(rows))
    assert torch.equal(copy[17]["input_ids"], expected[17])
    with pytest.raises(IndexError, match="0.*23,.*24"):
        rows[24]


def test_positions_and_labels_know_where_documents_begin(tmp_path):
    texts = [words(0, 3), words(3, 4), words(4, 16)]
    shards = tokenise(texts, tokenizer(), tmp_path / "s", fingerprint="")
    rows = FixedRows(shards, 8, "own")
    first, second = rows[0], rows[1]
    assert first["input_ids"].tolist() == list(range(3, 11))
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert first["labels"].tolist() == [IGNORED, 4, 5, IGNORED, IGNORED, 8, 9, 10]
    assert second["position_ids"].tolist() == list(range(8))
    assert second["labels"].tolist() == [IGNORED, *range(12, 19)]
    assert {entry.dtype for entry in first.values()} == {torch.int64}


def llama(_):
    """A tiny Llama of transformers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()


def ours(method):
    return build(config_of(method))


@pytest.mark.parametrize(("make", "method"), [(llama, None), (ours, None), (ours, "attnres"), (ours, "svformer")])
@torch.no_grad()
def test_documents_in_a_row_do_not_see_each_other(tmp_path, make, method):
    texts = [words(0, 9), words(9, 10), words(10, 24), words(3, 20)]
    shards = tokenise(texts, tokenizer(), tmp_path / "s", fingerprint="")
    model = make(method)
    packed = {name: entry[None] for name, entry in FixedRows(shards, 32, "own")[0].items()}  # (1, T)
    together = model(**packed, use_cache=False)
    parts = packed["input_ids"].split([9, 1, 14, 8], dim=1)  # of the last document what the row holds of it
    alone = torch.cat([model(part, use_cache=False).logits for part in parts], 1)  # (1, T, V)
    close(together.logits, alone, "logits of documents in a row and alone")
    counted = [part for part in parts if part.shape[1] > 1]
    losses = [model(part, labels=part, use_cache=False).loss * (part.shape[1] - 1) for part in counted]
    close(together.loss * (8 + 13 + 7), torch.stack(losses).sum(), "loss", FLOAT32)  # losses are in float32
    assert (model(packed["input_ids"], use_cache=False).logits - alone).abs().max() > 1e-3  # without positions they do


def test_validation_windows_are_spread_evenly(domains):
    every = FixedRows(domains["books"], 8, "books")
    rows = evenly_spaced(every, 5)
    assert [int(rows[number]["input_ids"][0]) for number in range(5)] == [
        3 + 8 * window for window in (0, 5, 10, 15, 20)
    ]
    assert len(rows) == 5 and len(every) == len(evenly_spaced(every, 25)) == len(evenly_spaced(every, 26)) == 25
    with pytest.raises(ValueError, match="300 tokens,.*205"):
        FixedRows(domains["books"], 300, "own")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 100}, "code: its text must have at least 100 tokens, one window, got 85"),
        ({"length": 1}, "rows must have at least 2 tokens, .* got 1"),
    ],
)
def test_rows_that_are_too_short_or_too_long_are_refused(domains, changes, message):
    with pytest.raises(ValueError, match=message):
        mixture(domains, **changes)
