"""On a real model: what-if equals the retrofit, and every retrofit of the documents verifies."""

import dataclasses

import pytest
import torch

import crosslayer
from benchmarks.retrofit import WIRINGS
from crosslayer.core.methods import method_class
from crosslayer.core.options import parse_layers
from crosslayer.output.manifest import write_manifest
from crosslayer.verbs.retrofit.cache import token_bytes
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.verify.run import verify

SHARES = {"uniattn-4": 0.85, "uniattn-2": 53 / 60, "uniattn-top6": 55 / 60, "cla-4": 0.70, "cla-2": 46 / 60,
          "cla-top6": 50 / 60, "drop-9": 0.70, "kvsharer-5": 25 / 30,
          "kvsharer-9": 0.70}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2():
    return crosslayer.load_model("smollm2", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", WIRINGS)
def test_what_if_is_the_retrofit_without_training(smollm2, name):
    model, tokenizer = smollm2
    method, groups = WIRINGS[name]
    chosen = method_class(method).from_groups(parse_layers(groups, 30), 30)
    made = convert(model, chosen, share_weights=True).model
    assert token_bytes(made) / token_bytes(model) == pytest.approx(SHARES[name], abs=1e-12)
    ids = tokenizer("It was the best of times, it was the worst of times, it was", return_tensors="pt").input_ids
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad(), crosslayer.what_if(model, chosen.plan(30)):
        logits, pretended = model(ids).logits, model.generate(ids, **options)
    with torch.no_grad():
        assert (made(ids).logits - logits).abs().max() < 1e-4
        found = made.generate(ids, **options)
    for step, row in enumerate(pretended.logits):
        first, second = row[0].topk(2).values
        if first - second < 1e-4:
            break  # a tie may go either way, and then the texts part
        assert found.sequences[0, ids.shape[1] + step] == pretended.sequences[0, ids.shape[1] + step]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when compiling
@pytest.mark.parametrize("name", [*WIRINGS, "stock"])
def test_every_retrofit_verifies(smollm2, name, tmp_path):
    model, tokenizer = smollm2
    if name == "stock":
        made = model
    else:
        method, groups = WIRINGS[name]
        chosen = dataclasses.replace(
            method_class(method).from_groups(parse_layers(groups, 30), 30), compensation="attention"
        )
        made = convert(model, chosen, fit="zero").model
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, weight in made.named_parameters():
                if parameter.endswith("compensation.weight"):
                    weight.normal_(0, 1e-3, generator=generator)
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_manifest(tmp_path / "model", made)
    rows = verify(tmp_path / "model").checks
    assert {row.status for row in rows} == {"PASS"}, [row for row in rows if row.status != "PASS"]
    assert len(rows) == 23
