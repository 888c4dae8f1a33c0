"""Evaluations of models whose cached tokens go: scored as they would be read token by token."""

import pytest
import torch

import crosslayer
from crosslayer.cache.running import smaller_cache
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.daily import daily
from tests.verbs.evaluate.test_exact import check_equal

NAMES = ("arc_easy_local", "lambada_openai_local")


def rescored(folder, evict, samples):
    """Return log likelihoods of all continuations, each read token by token after its context."""
    model, words = crosslayer.load_model(str(folder))
    answers = []
    with smaller_cache(model, evict) as new_cache:
        for sample in samples:
            for context, continuation in (argument for argument in sample["arguments"]):
                whole = words(context + continuation)["input_ids"]
                start = len(words(context.rstrip())["input_ids"])
                cache = new_cache()
                logits = [model(torch.tensor([whole[:start]]), **{CACHE: cache}).logits[:, -1]]
                for token in whole[start:-1]:
                    logits.append(model(torch.tensor([[token]]), **{CACHE: cache}).logits[:, -1])
                chances = torch.cat(logits).log_softmax(-1)
                answers.append(float(chances.gather(-1, torch.tensor(whole[start:])[:, None]).sum()))
    return answers


@pytest.mark.parametrize("evict", daily(["h2o:0.4", "streaming:0.5"], "h2o:0.4"))
def test_scores_are_those_of_a_text_that_is_read_token_by_token(pair, tasks, evict):
    options = {"tasks": NAMES[:1], "include_path": tasks, "allow_code": True, "device": "cpu", "num_fewshot": 2}
    evaluation = crosslayer.evaluate(pair[0], **options, evict=evict)
    samples = evaluation.lm_eval_results["candidate"]["samples"][NAMES[0]]
    scores = [float(answer[0]) for sample in samples for answers in sample["resps"] for answer in answers]
    torch.testing.assert_close(scores, rescored(pair[0], evict, samples), rtol=0, atol=1e-3)  # float32, sums
    plain = crosslayer.evaluate(pair[0], **options).lm_eval_results["candidate"]["samples"][NAMES[0]]
    full = [float(answer[0]) for sample in plain for answers in sample["resps"] for answer in answers]
    assert max(abs(one - other) for one, other in zip(scores, full, strict=True)) > 1e-2


@pytest.mark.parametrize(("evict", "share"), [("h2o:0.4", 1.0), ("h2o:64", 0.0)])
def test_it_is_said_how_many_requests_lost_tokens(pair, tasks, evict, share):
    """With two examples every request has more than 17 tokens, and fewer than 48."""
    options = {
        "tasks": NAMES[:1],
        "include_path": tasks,
        "allow_code": True,
        "device": "cpu",
        "num_fewshot": 2,
        "evict": evict,
    }
    evaluation = crosslayer.evaluate(pair[0], **options)
    (candidate,) = evaluation.candidates
    assert candidate.name == f"candidate, {evict}" and evaluation.headline()["candidates"] == [candidate.name]
    assert candidate.details["requests"] == 14 * 4 and candidate.details["reduced"] == share * 14 * 4
    said = " ".join(evaluation.sentences())
    assert ("evicted in 56 of 56 requests" if share else "No tokens were evicted: all 56 requests fit") in said


def test_an_eviction_that_keeps_all_changes_no_digit(pair, tasks):
    plain = crosslayer.evaluate(pair[0], tasks=NAMES, include_path=tasks, allow_code=True, batch=2, device="cpu")
    evicted = crosslayer.evaluate(
        pair[0], tasks=NAMES, include_path=tasks, allow_code=True, batch=2, device="cpu", evict="h2o:0.0"
    )
    check_equal(evicted.lm_eval_results["candidate"], plain.lm_eval_results["candidate"])


def test_only_the_candidate_evicts(pair, tasks):
    options = {"tasks": NAMES, "include_path": tasks, "allow_code": True, "device": "cpu"}
    evaluation = crosslayer.evaluate(pair[0], baseline=pair[0], evict="streaming:32", num_fewshot=2, **options)
    alone = crosslayer.evaluate(pair[0], num_fewshot=2, **options)
    assert [row.original for row in evaluation.rows] == [row.value for row in alone.rows]
    assert [row.value for row in evaluation.rows] != [row.value for row in alone.rows]
    assert "(streaming:32)" in evaluation.page()
