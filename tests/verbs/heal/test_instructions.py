"""Instructions: how they are read, cut, packed, and what counts in their loss."""

import json

import pytest
import torch
from torch.nn import functional

from crosslayer import hub
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.rows import PROMPT
from crosslayer.training.recipe import load_recipe
from crosslayer.training.rows import ExampleRows, Mixture, read_rows
from crosslayer.training.shards import tokenise
from crosslayer.training.texts import Columns, Instructions, read_examples
from crosslayer.training.tokenizers import make_tokenizer
from tests.helpers.recovery import recipe_in
from tests.helpers.training import model_of, trainer_of

COLUMNS = Columns(input="input", choices="choices")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("bytes", list)


def table(folder, rows, name="table.jsonl"):
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def of(path):
    return TextSource(str(path))


def shards_of(folder, tokenizer, examples):
    documents = [text for example in examples for text in example]
    return tokenise(documents, tokenizer, folder / "shards", fingerprint="0" * 64, parts=2)


def test_the_prompt_is_the_papers(tmp_path):
    row = {"instruction": "Add.", "input": "1 + 1", "choices": ["2", "3"], "response": "2"}
    path = table(tmp_path, [row, {**row, "instruction": None, "input": None, "choices": []}, {**row, "response": " "}])
    (prompt, response), (empty, _) = read_examples(of(path), COLUMNS)
    assert response == "2"
    assert prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n"
        "1 + 1\n- 2\n- 3\n\n### Response:"
    )
    assert empty == PROMPT.format(instruction="", input="")


def test_line_ends_and_byte_order_marks_change_no_example(tmp_path):
    row = {"instruction": "Add.\nNow.", "input": "1\n+ 1", "choices": ["2\n", "3"], "response": "2\n3"}
    plain = table(tmp_path, [row])
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(rb"\n", rb"\r\n") + b"\r\n")
    assert list(read_examples(of(windows), COLUMNS)) == list(read_examples(of(plain), COLUMNS))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"instruction": "a", "answer": "b"},
            r"'table.jsonl', line 2: no text in column 'response', got instruction",
        ),
        ({"instruction": 3, "response": "b", "input": ""}, "line 2: no text in column 'instruction'"),
        (
            {"instruction": "a", "response": "b", "input": "", "choices": "x"},
            "line 2: column 'choices' has no list of texts",
        ),
        ([1], "line 2: no text in column 'response', got list"),
    ],
)
def test_errors_name_the_line(row, message, tmp_path):
    good = {"instruction": "a", "input": "", "choices": [], "response": "b"}
    with pytest.raises(ValueError, match=message):
        list(read_examples(of(table(tmp_path, [good, row])), COLUMNS))


TURN = [{"role": "user", "content": "Add 1."}, {"role": "assistant", "content": "2"}]


def test_conversations_of_a_single_turn_are_examples(tmp_path, capsys):
    system = {"role": "system", "content": "Be brief."}
    rows = [{"messages": turns} for turns in (TURN, [system, *TURN], [*TURN, *TURN], TURN[:1], [])]
    examples = list(read_examples(of(table(tmp_path, rows)), Columns(messages="messages")))
    plain, briefly = (PROMPT.format(instruction=asked, input="") for asked in ("Add 1.", "Be brief.\n\nAdd 1."))
    assert examples == [(plain, "2"), (briefly, "2")]
    assert "skipped 3 rows" in capsys.readouterr().err
    for held in ("x", [1], [{"role": "user"}], [{"role": "user", "content": 3}]):
        with pytest.raises(ValueError, match="line 1: .*(messages|content)"):
            list(read_examples(of(table(tmp_path, [{"messages": held}])), Columns(messages="messages")))
    with pytest.raises(ValueError, match="response.*"):
        Columns(messages="messages", response="answer")


def test_datasets_hold_instructions_too(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": TURN}] * 25
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    monkeypatch.setattr(hub, "ask_hub", lambda *_: None)
    domain = Instructions("x", TextSource("some/set"), columns=Columns(messages="messages"))
    assert len(list(domain.training())) == 2 * 23 and len(list(domain.held_out())) == 2 * 2


def test_a_dataset_of_one_json_array_is_read(monkeypatch, tmp_path):
    """As axiong/pmc_llama_instructions holds them: a list of instruction, input and output."""
    datasets = pytest.importorskip("datasets")
    rows = [{"source": "pmc", "instruction": "Add 1.", "input": str(number), "output": "2"} for number in range(25)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    files = {"data_files": str(tmp_path / "train.json"), "split": "train", "cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("json", **files)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: loaded)
    monkeypatch.setattr(hub, "ask_hub", lambda *_: None)
    columns = Columns(instruction="instruction", input="input", response="output")
    documents = list(Instructions("x", TextSource("some/set"), columns=columns).training())
    assert documents[:2] == [PROMPT.format(instruction="Add 1.", input="0"), "2"] and len(documents) == 2 * 23


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURN},
        {"instruction": "Add 1.", "output": "2"},
        {"instruction": "Add 1.", "input": "", "response": "2"},
    ],
    ids=str,
)
def test_instructions_are_text_in_their_prompt(row, tmp_path):
    """As calibration text, for example."""
    (document,) = load_documents(of(table(tmp_path, [row])))
    assert document == PROMPT.format(instruction="Add 1.", input="") + "2"
    (text,) = load_documents(of(table(tmp_path, [{**row, "text": "own"}])))
    assert text == "own"
    with pytest.raises(ValueError, match="text.*column 'body'"):
        list(load_documents(TextSource(str(table(tmp_path, [row])), column="body")))


def test_a_table_that_is_no_jsonl_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=".jsonl.*got 'a.txt'"):
        list(read_examples(of(tmp_path / "a.txt"), COLUMNS))


def test_every_20th_is_held_out_and_nothing_is_in_both(tmp_path):
    rows = [{"instruction": f"i{k}", "response": f"r{k}"} for k in range(43)]
    domain = Instructions("x", TextSource(str(table(tmp_path, rows))))
    kept, out = list(domain.training()), list(domain.held_out())
    assert out[1::2] == ["r3", "r23"]
    assert sorted(kept[1::2] + out[1::2]) == sorted(f"r{k}" for k in range(43))
    other = Instructions("x", TextSource(str(table(tmp_path, rows[:2], "b.jsonl"))))
    with pytest.raises(ValueError, match="needed to hold some out"):
        list(other.held_out())
    assert domain.digest() != Instructions("x", domain.source, columns=Columns(response="instruction")).digest()


def test_special_tokens_are_only_at_the_end_of_a_pair(tmp_path, tokenizer):
    examples = [("ab", "c"), ("d", "ef")]
    shards = shards_of(tmp_path, tokenizer, examples)
    end = tokenizer.eos_token_id
    assert shards.read(0, shards.tokens).tolist() == [*b"abc", end, *b"def", end]
    assert shards.starts(0, shards.tokens).tolist() == [0, 2, 4, 5]


def test_rows_hold_whole_examples_and_labels_the_responses(tmp_path, tokenizer):
    examples = [("aaa", "b"), ("cc", "d"), ("e" * 20, "f"), ("gg", "hh"), ("i", "j")]
    shards = shards_of(tmp_path, tokenizer, examples)
    rows = ExampleRows(shards, 10, 257, "x")
    assert len(rows) == 2 and rows.left_out == 1
    end = tokenizer.eos_token_id
    first = rows[0]
    assert first["input_ids"].tolist() == [*b"aaab", end, *b"ccd", end, 257]
    assert first["labels"].tolist() == [-100] * 3 + [ord("b"), end, -100, -100, ord("d"), end, -100]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]
    assert rows[1]["input_ids"].tolist() == [*b"gghh", end, *b"ij", end, 257, 257]
    every = ExampleRows(shards, 10, 257, "x", responses_alone=False)[0]
    assert every["labels"].tolist() == [-100, *b"aab", end, -100, *b"cd", end, -100]
    with pytest.raises(ValueError, match="5 instructions.*data.length.*2"):
        ExampleRows(shards, 2, 0, "x")


def test_all_examples_stand_in_some_row_once(tmp_path, tokenizer):
    examples = [("p" * (1 + k % 7), chr(97 + k % 26) * (1 + k % 5)) for k in range(60)]
    rows = ExampleRows(shards_of(tmp_path, tokenizer, examples), 24, 257, "x")
    text = [id_ for row in map(rows.__getitem__, range(len(rows))) for id_ in row["input_ids"].tolist() if id_ != 257]
    expected = [id_ for prompt, response in examples for id_ in [*prompt.encode(), *response.encode(), 256]]
    assert text == expected


def test_the_loss_is_that_of_each_example_by_itself(tmp_path, tokenizer):
    """The trainer's loss on packed rows is the mean over response tokens of examples that were run one by one."""
    examples = [("what?", "this"), ("and", "that one"), ("so", "x"), ("a longer prompt", "end")]
    shards = shards_of(tmp_path, tokenizer, examples)
    rows = ExampleRows(shards, 24, 257, "x")
    assert len(rows) == 2
    model = model_of(["resformer"], vocab_size=258, attention_dropout=0.0).double()
    total, count = 0.0, 0
    for prompt, response in examples:
        ids = torch.tensor([[*prompt.encode(), *response.encode(), 256]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0]
        start = len(prompt)
        total += functional.cross_entropy(logits[start - 1 : -1], ids[0, start:], reduction="sum").item()
        count += ids.shape[1] - start
    batch = {key: torch.stack([rows[item][key] for item in range(2)]) for key in rows[0]}
    data = Mixture({"x": rows}, {"x": 1.0}, 0, 40)
    trainer = trainer_of(tmp_path / "run", model, data, {"x": rows})
    assert trainer.compute_loss(model, batch).item() == pytest.approx(
        total / count, rel=1e-6
    )  # transformers sums in float32
    assert trainer.evaluate()["eval_x_loss"] == pytest.approx(total / count, rel=1e-6)


def test_a_mixture_takes_rows_that_are_cut_otherwise(tmp_path, tokenizer):
    rows = ExampleRows(shards_of(tmp_path, tokenizer, [("p", "r" * k) for k in range(1, 9)]), 12, 257, "x")
    mixture = Mixture({"x": rows}, {"x": 1.0}, 0, 2 * len(rows))
    numbers = [mixture.window(item)[1] for item in range(2 * len(rows))]
    assert sorted(numbers[: len(rows)]) == sorted(numbers[len(rows) :]) == list(range(len(rows)))
    for item, number in enumerate(numbers):
        assert torch.equal(mixture[item]["input_ids"], rows[number]["input_ids"])


def test_rows_that_are_held_out_come_from_all_files(tmp_path):
    """Not from the first alone, whatever the number of files."""
    for letter in "abcd":
        rows = [{"instruction": letter, "response": letter * 90} for _ in range(200)]
        (tmp_path / f"{letter}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    domain = {"name": "say", "source": str(tmp_path / "*.jsonl"), "columns": {}}
    data = {"length": 512, "domains": [domain]}
    recipe = load_recipe(recipe_in(tmp_path, data=data), ["judge.held_out=8"])
    tokenizer = make_tokenizer("bytes", list)
    held_out = read_rows(recipe, tokenizer).held_out["say"]
    texts = [tokenizer.decode(held_out[number]["input_ids"]) for number in range(8)]
    assert all(any(letter * 90 in text for text in texts) for letter in "abcd")
