"""Hidden numbers are asked on the cache that a way gives back: the text is stored, the question follows."""

import torch

from crosslayer.codec.quality import exact, numbers_found
from crosslayer.judge import retrieval
from crosslayer.judge.hidden import prompt_ids
from crosslayer.judge.retrieval import answers, hidden_samples
from tests.verbs.needles.oracle import TOKENIZER, random_model


def test_an_exact_cache_gives_the_answers_of_no_cache(monkeypatch):
    model, samples = random_model(torch.float32), hidden_samples(TOKENIZER, [512], 1)[:2]
    seen, held = [], []

    def keep(cache, ids):
        held.append(TOKENIZER.decode(ids[0]))
        assert cache.get_seq_length() == ids.shape[1]
        return exact(cache, ids)

    def listen(*args, **options):
        for texts in answers(*args, **options):
            seen.extend(texts)
            yield texts

    monkeypatch.setattr(retrieval, "answers", listen)
    found = numbers_found(model, TOKENIZER, samples, {"exact": keep})
    prompts = [prompt_ids(TOKENIZER, sample.prompt) for sample in samples]
    plain = [text for texts in answers(model, TOKENIZER, prompts, ["none", "none"], batch=1) for text in texts]
    assert seen == plain and found == {"exact": [False, False]}
    for text, sample in zip(held, samples, strict=True):
        assert sample.value in text and sample.text.rpartition("\n")[2] not in text
