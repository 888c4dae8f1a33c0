"""The forty numbers of a report are those that `crosslayer needles` asks for."""

import torch

import crosslayer
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.judge import Judge
from crosslayer.judge.page import retrieval_sentence
from crosslayer.judge.retrieval import LENGTHS, askable_samples, found_in, responses
from tests.verbs.needles.oracle import TOKENIZER, Oracle, config, oracle, random_model


class Even(Oracle):
    """Knows even numbers alone."""

    def answer(self, prompt):
        number = super().answer(prompt)
        return number if int(number) % 2 == 0 else "unknown"


def test_an_oracle_finds_forty_and_random_weights_none():
    right, wrong = oracle(), random_model(torch.float32)
    samples = askable_samples(right, TOKENIZER)
    lengths = list(dict.fromkeys(sample.length for sample in samples))
    assert samples == askable_samples(wrong, TOKENIZER) and set(lengths) <= set(LENGTHS) and 512 in lengths
    same, worse = (Judge(right, tokenizer=TOKENIZER).retrieval([Candidate("one", m)], samples) for m in (right, wrong))
    assert [row.scope for row in same] == ["all", *(f"{length} tokens" for length in lengths)]
    assert all(row.value == row.original == 1 for row in same) and all(row.value == 0 for row in worse)
    asked = 10 * len(lengths)
    (sentence,), (bad,) = retrieval_sentence(same), retrieval_sentence(worse)
    assert f"retrieves {asked} of {asked} " in sentence
    assert f"retrieves 0 of {asked} " in bad and f"the original {asked}: −100 (−100 to " in bad


def test_what_is_asked_is_what_the_verb_asks():
    """One number in RULER's phrasing, and in batches: the same questions, whichever way they are asked."""
    model = Even(config())
    verb = crosslayer.needles(model, TOKENIZER, lengths=[512], keys=1, samples=2, seed=3)
    samples = askable_samples(model, TOKENIZER, [512], seed=3)
    found = found_in(responses(model, TOKENIZER, samples), samples)
    assert [sample.value for sample in samples] == [question.value for question in verb.questions]
    assert found == [int(question.value) % 2 == 0 for question in verb.questions]
    assert 0 < sum(found) == round(10 * verb.score(0, 512).value) < len(found) == 10


def test_a_judge_asks_each_model_once():
    model, calls = Even(config()), []
    judge = Judge(model, tokenizer=TOKENIZER)
    samples = askable_samples(model, TOKENIZER, [512])
    generate = model.generate
    model.generate = lambda *args, **options: calls.append(1) or generate(*args, **options)
    rows = [judge.retrieval([Candidate("same")], samples) for _ in range(2)]
    assert rows[0] == rows[1] and len(calls) == 2 * len(samples) == 20  # the original and the candidate


def test_what_cannot_be_asked_is_left_out():
    assert askable_samples(oracle(), None) == []
    few = random_model(torch.float32)
    few.config.max_position_embeddings = 700
    assert max(sample.length for sample in askable_samples(few, TOKENIZER)) <= 512
    few.config.max_position_embeddings = 255
    assert askable_samples(few, TOKENIZER) == []
