"""Tasks on prompts that are stored and continued, by a judge."""

import copy

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers.processors import TemplateProcessing

import crosslayer
from crosslayer.codec.codec import Codec
from crosslayer.codec.quality import exact, stored
from crosslayer.core.transformers_versions import CACHE
from crosslayer.judge.candidate import candidate_of
from crosslayer.judge.judge import Judge
from crosslayer.judge.tasks.harness import Tasks, task_names
from crosslayer.judge.tasks.lm import language_model
from crosslayer.verbs.fit_codec import run
from tests.helpers.codecs import cache_of, random_ids

NAMES = ("arc_easy_local", "lambada_openai_local", "boolq_local")  # answers of several tokens, and of one


def inverted(cache, ids):
    """Lose a prompt: its values change sign."""
    for layer in cache.layers:
        layer.values = -layer.values
    return cache, 0


def likelihoods(results):
    """Return the log likelihood of each answer by task."""
    return {
        task: [float(answer[0]) for sample in samples for answers in sample["resps"] for answer in answers]
        for task, samples in results["samples"].items()
    }


def test_answers_to_stored_contexts_come_from_what_was_stored(pair, tasks):
    """The last token of a context reads what was stored, so that answers of a single token depend on it too."""
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    judge, asked = Judge(model, tokenizer=tokenizer, catches=False), Tasks(NAMES, tasks, True)
    found = [likelihoods(judge.task_results(one, asked, 4)) for one in (None, stored("", exact), stored("", inverted))]
    for name in NAMES:
        plain, same, other = (np.array(one[name]) for one in found)
        np.testing.assert_allclose(same, plain, atol=1e-3)  # sums of float32 in another order
        assert np.abs(other - plain).min() > 1e-2
    ids = torch.tensor([tokenizer("w1 w2 w3 w4 w5 w6 w7 w8")["input_ids"]])
    cache = cache_of(model, ids[:, :-1])
    naive = model(ids[:, -1:], **{CACHE: inverted(cache, ids)[0]}).logits
    with torch.no_grad(), stored("", inverted).running(model) as new_cache:
        cache = new_cache()
        model(ids[:, :-1], **{CACHE: cache})
        torch.testing.assert_close(model(ids[:, -1:], **{CACHE: cache}).logits, naive)


@pytest.mark.slow  # scores the tasks twice
def test_a_judge_compares_stored_contexts_and_smaller_caches_on_the_same_items(pair, tasks):
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    candidates = [stored("exact", exact), candidate_of("int8")]
    rows = Judge(model, tokenizer=tokenizer, catches=False).tasks(candidates, Tasks(NAMES, tasks, True), limit=6)
    alone = crosslayer.evaluate(model, tokenizer, tasks=NAMES, include_path=tasks, allow_code=True, limit=6)
    own = {(row.scope, row.quantity): row.value for row in alone.rows}
    for candidate in candidates:
        found = [row for row in rows if row.candidate == candidate.name]
        assert {(row.scope, row.quantity): row.original for row in found} == pytest.approx(own, rel=1e-5)


def test_answers_are_generated_from_what_was_stored(pair):
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    ids = torch.tensor([tokenizer("w1 w2 w3 w4 w5 w6 w7 w8")["input_ids"]])
    texts = [model.generate(ids, max_new_tokens=6, do_sample=False)]
    for way in (exact, inverted):
        with stored("way", way).running(model) as new_cache:
            lm = language_model(model, tokenizer, 1, new_cache, scores=False)
            texts.append(lm._model_generate(ids, max_length=ids.shape[1] + 6, stop=["no such text"]))
    cache = inverted(cache_of(model, ids[:, :-1]), ids)[0]
    naive = model.generate(ids, max_new_tokens=6, do_sample=False, **{CACHE: cache})
    assert texts[0].tolist() == texts[1].tolist() and texts[2].tolist() == naive.tolist() != texts[0].tolist()


def test_a_whole_text_begins_with_bos_once(pair, monkeypatch):
    """Where the tokenizer adds BOS, as Gemma's and Llama 3's do, lm-eval itself would put it twice."""
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    own = copy.deepcopy(tokenizer)
    bos = (own.bos_token, own.bos_token_id)
    own.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    seen = []
    for one in (tokenizer, own):
        lm = language_model(model, one, 1)
        call = lm._model_call
        monkeypatch.setattr(
            lm,
            "_model_call",
            lambda ids, *rest, call=call, **more: (seen.append(ids[0].tolist()), call(ids, *rest, **more))[1],
        )
        request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=("w1 w2 w3 w4",), idx=0)
        assert len(lm.loglikelihood_rolling([request])) == 1
        assert lm.tok_encode("w1 w2") == one("w1 w2")["input_ids"]  # contexts of other tasks are as they were
    assert seen[0] == seen[1] and seen[1].count(own.bos_token_id) == 1


def test_tasks_are_listed_or_separated_by_commas():
    assert task_names("a, b") == task_names(["a,b"]) == task_names(("a", "b")) == ("a", "b")


def test_a_codec_is_scored_on_tasks(monkeypatch, pair, tasks, tmp_path):
    monkeypatch.setattr(run, "read_tasks", lambda names: Tasks(names, tasks, True))
    encoded, encode = [], Codec.encode
    monkeypatch.setattr(Codec, "encode", lambda *given, **options: encoded.append(1) or encode(*given, **options))
    model, tokenizer = crosslayer.load_model(str(pair[0]), device="cpu")
    with pytest.raises(ValueError, match="tokenizer"):
        crosslayer.fit_codec(model, tasks=NAMES)
    texts = {"calibration_text": {"a": random_ids(8, 40)}, "text": {"b": random_ids(6, 40, 1)}}
    cut = {"calibration": 8, "length": 40, "windows": 4, "prompt": 30, "continued": 10, "repeats": 1, "numbers": 0}
    report = crosslayer.fit_codec(model, tokenizer, share=0.5, tasks=NAMES, limit=6, **cut, **texts)
    assert len(encoded) > 3 * 6 * len(NAMES)  # of three codecs, and each context of arc_easy once
    scored = {row.candidate for row in report.rows if row.scope == NAMES[0]}
    assert scored == {"codec", "codec × 0.5", "codec × 0.25"}
    assert {row.details["items"] for row in report.rows if row.scope == NAMES[0]} == {6}
    report.save(tmp_path / "codec")
    assert NAMES[0] in (tmp_path / "codec" / "report.html").read_text()
