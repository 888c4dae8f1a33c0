"""Files of tasks and tiny models for evaluations, offline."""

import gzip
import json
import random
import zipfile
from pathlib import Path

import torch

from benchmarks.local_tasks import write_local_tasks
from tests.helpers.text import WORDS, tokenizer
from tests.helpers.tiny import tiny

ITEMS = 14


def own_tokenizer():
    return tokenizer(unk_token="[UNK]", eos_token="[SEP]", bos_token="[CLS]")


def model(seed=0):
    """A random model that differs from seed to seed."""
    built = tiny("llama", dtype=torch.float32, vocab_size=len(WORDS), max_position_embeddings=48)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return built


def saved(folder: Path, seed=0) -> Path:
    model(seed).save_pretrained(folder)
    own_tokenizer().save_pretrained(folder)
    return folder


def words(draw, count):
    return " ".join(f"w{draw.randrange(500)}" for _ in range(count))


def data(folder: Path, items: int = ITEMS) -> Path:
    """Write a folder of data in the columns of the sets."""
    folder.mkdir()
    draw = random.Random(0)
    rows = {"arc_easy.test": [], "arc_easy.validation": [], "piqa.validation": [], "lambada_openai.test": []}
    rows |= {"social_i_qa.validation": [], "commonsense_qa.validation": [], "boolq.validation": []}
    rows |= {"pubmedqa_l.test500": [], "medqa.test": [], "winogrande.validation": []}
    for number in range(items):
        four = {"label": [*"ABCD"], "text": [words(draw, 1 + i % 3) for i in range(4)]}
        for split in ("test", "validation"):
            question = {"question": words(draw, 6), "choices": four, "answerKey": draw.choice("ABCD")}
            rows[f"arc_easy.{split}"].append(question)
        solutions = {"goal": words(draw, 5), "sol1": words(draw, 2), "sol2": words(draw, 3), "label": number % 2}
        rows["piqa.validation"].append(solutions)
        rows["lambada_openai.test"].append({"text": words(draw, 9)})
        rows["social_i_qa.validation"].append(
            {"context": words(draw, 4), "question": words(draw, 3), "label": str(1 + number % 3)}
            | {f"answer{letter}": words(draw, 2) for letter in "ABC"}
        )
        five = {"label": [*"ABCDE"], "text": [words(draw, 1) for _ in range(5)]}
        rows["commonsense_qa.validation"].append({"question": words(draw, 4), "choices": five, "answerKey": "A"})
        rows["boolq.validation"].append(
            {"question": words(draw, 3), "passage": words(draw, 9), "answer": number % 3 == 0}
        )
        rows["pubmedqa_l.test500"].append(
            {"QUESTION": words(draw, 3), "CONTEXTS": [words(draw, 3)] * 2, "final_decision": ["yes", "no"][number % 2]}
        )
        options = {letter: words(draw, 1) for letter in "ABCDE"}
        rows["medqa.test"].append({"question": words(draw, 3), "options": options, "answer_idx": "ABCDE"[number % 5]})
        rows["winogrande.validation"].append(
            {"sentence": f"w1 w2 _ {words(draw, 3)}", "option1": "w4", "option2": "w5", "answer": str(1 + number % 2)}
        )
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if name.startswith("piqa"):
            (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{name}.jsonl").write_text(text)
    article = " \n = w1 w2 = \n \n " + words(draw, 90) + " \n \n = = w5 = = \n \n " + words(draw, 20) + " \n"
    (folder / "wikitext2_test.txt").write_text(article * 3)
    with zipfile.ZipFile(folder / "BLiMP.zip", "w") as packed:
        for name in ("causative", "adjunct_island", "no_such_set"):
            lines = [{"sentence_good": words(draw, 4), "sentence_bad": words(draw, 4)} for _ in range(items)]
            packed.writestr(f"data/{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return folder


def local_tasks(folder: Path, items: int = ITEMS) -> Path:
    """Write data and tasks into a folder; return that of the tasks."""
    write_local_tasks(data(folder / "data", items), folder / "tasks")
    return folder / "tasks"
