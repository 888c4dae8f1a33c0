"""The forty numbers of a report are those that `crosslayer needles` asks for."""

import torch

import crosslayer
from crosslayer.judge.retrieval import LENGTHS, count_retrieved, measure_retrieval, retrieval_sentence
from tests.verbs.needles.oracle import TOKENIZER, Oracle, config, oracle, random_model


class Even(Oracle):
    """Knows even numbers alone."""

    def answer(self, prompt):
        number = super().answer(prompt)
        return number if int(number) % 2 == 0 else "unknown"


def test_an_oracle_finds_forty_and_random_weights_none():
    right, wrong = measure_retrieval(oracle(), TOKENIZER), measure_retrieval(random_model(torch.float32), TOKENIZER)
    lengths = [result.length for result in right]
    assert lengths == [result.length for result in wrong] and set(lengths) <= set(LENGTHS) and 512 in lengths
    assert all(result.found == (True,) * 10 for result in right) and count_retrieved(wrong) == 0
    asked = 10 * len(lengths)
    same, worse = retrieval_sentence(right, right), retrieval_sentence(wrong, right)
    assert f"retrieves {asked} of {asked} " in same
    assert f"retrieves 0 of {asked} " in worse and f"the original {asked}: −100 (−100 to " in worse


def test_what_is_asked_is_what_the_verb_asks():
    model = Even(config())
    (short,) = [result for result in measure_retrieval(model, TOKENIZER, seed=3) if result.length == 512]
    verb = crosslayer.needles(model, TOKENIZER, lengths=[512], keys=1, samples=2, seed=3)
    assert short.found == tuple(int(question.value) % 2 == 0 for question in verb.questions)
    assert 0 < sum(short.found) == round(10 * verb.score(0, 512).value) < len(short.found) == 10


def test_what_cannot_be_asked_is_left_out():
    assert measure_retrieval(oracle(), None) == ()
    few = random_model(torch.float32)
    few.config.max_position_embeddings = 700
    assert max(result.length for result in measure_retrieval(few, TOKENIZER)) <= 512
    few.config.max_position_embeddings = 255
    assert measure_retrieval(few, TOKENIZER) == ()
