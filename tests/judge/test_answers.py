"""Answers of a batch are those of each prompt alone, with any cache."""

import torch
from transformers import DynamicCache

from crosslayer.cache.running import smaller_cache
from crosslayer.judge.hidden import Samples, prompt_ids
from crosslayer.judge.retrieval import answers, padded
from tests.helpers.saved import ours, tokenizer
from tests.verbs.needles.oracle import TOKENIZER, random_model

MADE = Samples(TOKENIZER, new_tokens=8)


def prompts():
    return [prompt_ids(TOKENIZER, MADE.sample(length, 50, 0).prompt) for length in (512, 640, 513)]


def said(model, asked, tokenizer=TOKENIZER, values=None, **options):
    values = values or ["never said"] * len(asked)
    return [text for texts in answers(model, tokenizer, asked, values, new_tokens=8, **options) for text in texts]


def test_batches_say_what_single_prompts_say():
    model, asked = random_model(), prompts()
    alone = said(model, asked, batch=1)
    assert said(model, asked, batch=2) == said(model, asked, batch=3) == alone and len(set(alone)) == 3
    ids = torch.tensor(asked[:1])
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert alone[0] == TOKENIZER.decode(new, skip_special_tokens=True)


def test_an_answer_ends_with_its_value():
    model, asked = random_model(), prompts()
    whole = said(model, asked)
    values = [whole[0][:3].strip(), "never said", whole[2][:5].strip()]
    ended = said(model, asked, values=values)
    assert ended == said(model, asked, values=values, batch=1)
    assert ended[1] == whole[1]
    for number in (0, 2):
        assert values[number] in ended[number] and len(ended[number]) < len(whole[number])
        assert whole[number].startswith(ended[number])


def test_settings_of_the_folder_change_nothing():
    model, asked = random_model(), prompts()
    expected = said(model, asked)
    for name, value in {
        "use_cache": False,
        "no_repeat_ngram_size": 2,
        "forced_eos_token_id": 5,
        "max_time": 0.0,
        "stop_strings": ["a"],
        "prompt_lookup_num_tokens": 3,
        "repetition_penalty": 2.0,
        "num_beams": 2,
    }.items():
        setattr(model.generation_config, name, value)
    settings = model.generation_config
    assert said(model, asked) == expected and model.generation_config is settings
    with smaller_cache(model, "h2o:64") as new_cache:
        assert said(model, asked, batch=2, new_cache=new_cache) == said(model, asked, batch=1, new_cache=new_cache)


def test_batches_of_our_models_do_too():
    model = ours("uniattn").double().eval()
    asked = [[3, 4, 5], [7, 8, 9, 10, 11], [4, 4]]
    alone = said(model, asked, tokenizer(), batch=1)
    assert said(model, asked, tokenizer(), batch=3) == alone and all(alone)


def test_each_batch_has_a_cache_of_its_own():
    model, made = random_model(), []

    def new_cache():
        made.append(DynamicCache(config=model.config))
        return made[-1]

    asked = prompts()
    assert said(model, asked, batch=2, new_cache=new_cache) == said(model, asked, batch=2)
    assert len(made) == 2 and made[0].get_seq_length() > max(map(len, asked[:2]))


def test_padding_stands_on_the_left():
    ids, mask = padded([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
