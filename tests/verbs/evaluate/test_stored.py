"""Tasks on prompts that are stored and continued, by a judge."""

import torch

import crosslayer
from crosslayer.codec.judge import exact, stored
from crosslayer.core.transformers_versions import CACHE
from crosslayer.judge.candidate import candidate_of
from crosslayer.judge.judge import Judge
from crosslayer.judge.tasks.harness import Tasks
from crosslayer.verbs.fit_codec import run
from tests.helpers.codecs import random_ids

NAMES = ("arc_easy_local", "lambada_openai_local")


def inverted(cache, ids):
    """Lose a prompt: its values change sign."""
    for layer in cache.layers:
        layer.values = -layer.values
    return cache, 0


def test_a_judge_scores_stored_prompts_and_smaller_caches_on_the_same_items(pair, tasks):
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    candidates = [stored("exact", exact), stored("inverted", inverted), candidate_of("int8")]
    rows = Judge(model, tokenizer=tokenizer, catches=False).tasks(candidates, Tasks(NAMES, tasks, True), limit=6)
    alone = crosslayer.evaluate(model, tokenizer, tasks=NAMES, include_path=tasks, allow_code=True, limit=6)
    own = {(row.scope, row.quantity): row.value for row in alone.rows}
    by_name = {one.name: [row for row in rows if row.candidate == one.name] for one in candidates}
    assert {len(found) for found in by_name.values()} == {len(own)}
    assert all(abs(row.original - own[row.scope, row.quantity]) <= 1e-5 * abs(row.original) for row in rows)
    # a context by itself, and then its answers: float32 rounds other sums
    assert all(abs(row.value - row.original) <= 1e-4 * abs(row.original) for row in by_name["exact"])
    assert any(abs(row.value - row.original) > 1e-2 * abs(row.original) for row in by_name["inverted"])


def test_answers_are_generated_from_what_was_stored(pair):
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    ids = torch.tensor([tokenizer("w1 w2 w3 w4 w5 w6 w7 w8")["input_ids"]])
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **options)
    texts = []
    for way in (exact, inverted):
        with stored("way", way).running(model) as new_cache:
            texts.append(model.generate(ids, **options, **{CACHE: new_cache()}))
    assert torch.equal(texts[0], plain) and not torch.equal(texts[1], plain)


def test_a_codec_is_scored_on_tasks(monkeypatch, pair, tasks, tmp_path):
    monkeypatch.setattr(run, "read_tasks", lambda names: Tasks(names, tasks, True))
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    texts = {"calibration_text": {"a": random_ids(8, 40)}, "text": {"b": random_ids(6, 40, 1)}}
    cut = {"calibration": 8, "length": 40, "windows": 4, "prompt": 30, "continued": 10, "repeats": 1, "numbers": 0}
    report = crosslayer.fit_codec(model, tokenizer, share=0.5, tasks=NAMES, limit=6, **cut, **texts)
    scored = {row.candidate for row in report.rows if row.scope == NAMES[0]}
    assert scored == {"codec", "codec × 0.5", "codec × 0.25"}
    assert {row.details["items"] for row in report.rows if row.scope == NAMES[0]} == {6}
    report.save(tmp_path / "codec")
    assert NAMES[0] in (tmp_path / "codec" / "report.html").read_text()
