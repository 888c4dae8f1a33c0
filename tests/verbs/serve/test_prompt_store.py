"""vLLM loads and saves prompts through the codec, and loads the same caches as transformers from the same files."""

import copy
import importlib.util
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch

from crosslayer.codec.codec import Codec
from crosslayer.codec.fingerprint import model_print
from crosslayer.codec.fit import calibrate, fit_chain
from crosslayer.codec.states import read_shapes
from crosslayer.codec.store import PromptStore
from crosslayer.core.transformers_versions import CACHE
from crosslayer.verbs.serve import prompts
from tests.helpers.bytelevel import byte_level
from tests.helpers.codecs import cache_of, random_ids
from tests.helpers.tiny import tiny
from tests.verbs.serve.test_server import serving
from tests.verbs.serve.test_vllm import by_vllm, job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see make test-serving"),
]
SIZE = 32  # tokens of vLLM's blocks
LENGTH, NEW, LATE = 600, 12, 120
CLOSE = 2e-3  # of log probabilities in float32: vLLM adds in another order, and the prompt has 600 tokens
LONG = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "block_size": SIZE}


@cache
def fitted(family="llama", **changes):
    """A model with heads that vLLM's CPU attention takes, and a codec so coarse that its damage shows."""
    model = tiny(family, dtype=torch.float32, head_dim=32, max_position_embeddings=1024, **changes)
    calibration = calibrate(model, read_shapes(model), random_ids(12, 60), random_ids(2, 60, 1))
    return model, Codec(fit_chain(calibration, 0.1), model_print(model))


def store_job(folders, ids, store="prompts", new=NEW, **options):
    """A job of an engine with a store, a folder in `folders` beside those of the model and of the codec."""
    config = prompts.transfer_config(fitted()[1], folders / "codec", folders / store, None)
    own = job(folders / "model", ids, new, **{**LONG, **options}, kv_transfer_config=config)
    return {**own, "new_logprobs_alone": True}


@torch.no_grad()
def logprobs(model, prompt, chosen, store=None, stop=None):
    """The model's log probabilities of new tokens (T, V), with the exact cache, or that of a store up to `stop`."""
    ids, kept = torch.tensor([prompt + chosen]), {}
    if store is not None:
        stop = stop or (len(prompt) - 1) // SIZE * SIZE
        kept[CACHE], length = PromptStore(store, fitted()[1]).load(ids[:, : stop + 1], model)
        assert length == stop
        ids = ids[:, stop:]
    logits = model(ids, **kept).logits[0].log_softmax(-1)
    return logits[-len(chosen) - 1 : -1]


def error(ours, answer, row=0):
    """The largest error of vLLM's log probabilities; its tokens are the likeliest, or as likely within that."""
    tokens, theirs = answer["tokens"][row], torch.tensor(answer["logprobs"][row])
    found = float((ours.gather(1, torch.tensor(tokens)[:, None])[:, 0] - theirs).abs().max())
    best = ours.max(1).values
    assert found > CLOSE or ((best - ours.gather(1, torch.tensor(tokens)[:, None])[:, 0]) < 2 * CLOSE).all()
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of engines one after the other: a first run; a restart; little memory; a damaged store; a full disk."""
    folder = tmp_path_factory.mktemp("served")
    model, codec = fitted()
    model.save_pretrained(folder / "model")
    byte_level("smollm", 60).save_pretrained(folder / "model")
    codec.save(folder / "codec")
    text, other, short = (random_ids(1, length, seed)[0].tolist() for length, seed in ((LENGTH, 5), (90, 6), (20, 7)))
    longer, apart = text + other, text[:300] + other
    ids = random_ids(1, LENGTH, 9)
    written = PromptStore(folder / "damaged", codec)
    written.save(ids, cache_of(model, ids))
    for path in (folder / "damaged").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    jobs = [
        store_job(folder, [text, short]),
        store_job(folder, [text, longer, apart, short, other]),
        store_job(folder, [text, longer], new=LATE, kv_cache_memory_bytes=47 * SIZE * 3 * 2 * 2 * 32 * 4),
        store_job(folder, [text[:256] + other, text], enable_prefix_caching=True),
        store_job(folder, [ids[0].tolist(), ids[0, :300].tolist() + other], "damaged"),
        {**store_job(folder, [text], "full"), "full": True},
    ]
    found, log = by_vllm(jobs)
    return folder, model, [own["prompts"] for own in jobs], found, log


def test_a_restart_continues_from_the_store_as_transformers_does(answers):
    folder, model, (first, again, *_), (fresh, loaded, *_), _ = answers
    assert fresh["cached"] == [0, 0] and fresh["prefilled"] == LENGTH + 20
    assert error(logprobs(model, first[0], fresh["tokens"][0]), fresh) < CLOSE
    assert loaded["cached"] == [576, 576, 288, 0, 0]
    assert loaded["prefilled"] == sum(map(len, again)) - sum(loaded["cached"])
    assert loaded["metrics"]["vllm:external_prefix_cache_hits"] == sum(loaded["cached"])
    stored = logprobs(model, again[0], loaded["tokens"][0], folder / "prompts")
    assert error(stored, loaded) < CLOSE
    assert error(logprobs(model, again[0], loaded["tokens"][0]), loaded) > 5 * CLOSE  # it is not the exact cache
    for row in (3, 4):
        assert error(logprobs(model, again[row], loaded["tokens"][row]), loaded, row) < CLOSE


def test_prompts_that_begin_alike_share_blocks(answers):
    folder = answers[0]
    names = [path.stem.split("-") for path in (folder / "prompts").rglob("*.kv")]
    assert len(names) == len({name for _, name in names})
    # 576 tokens are 256 + 256 + 64; then 672 − 576, 384 − 256 and 320 − 256 more, and 64 of another prompt
    assert len(names) == 3 + 1 + 1 + 1 + 1


def test_what_memory_holds_is_not_loaded(answers):
    """The second prompt finds 256 tokens that the first one loads in the same step, and loads what follows."""
    folder, model, (_, _, _, both, *_), (_, _, _, answer, *_), _ = answers
    assert answer["cached"] == [256, 576]
    assert answer["metrics"]["vllm:prefix_cache_hits"] == 256
    assert answer["metrics"]["vllm:external_prefix_cache_hits"] == 256 + 320
    for row, (text, stop) in enumerate(zip(both, (256, 576), strict=True)):
        assert error(logprobs(model, text, answer["tokens"][row], folder / "prompts", stop), answer, row) < CLOSE


def test_a_request_that_is_put_off_is_loaded_again(answers):
    """47 blocks of 32 tokens hold both prompts, and not all that follows them."""
    folder, model, (_, _, both, *_), (_, _, answer, *_), _ = answers
    assert answer["metrics"]["vllm:num_preemptions"] > 0 and answer["cached"] == [576, 672]
    for row, text in enumerate(both):
        assert error(logprobs(model, text, answer["tokens"][row], folder / "prompts"), answer, row) < CLOSE


def test_a_damaged_block_is_computed_again(answers):
    folder, model, (*_, both, _), (*_, damaged, _), log = answers
    for row, text in enumerate(both):
        assert error(logprobs(model, text, damaged["tokens"][row]), damaged, row) < CLOSE
    assert "cannot be loaded" in log
    # the step that read nothing ends with the second prompt complete, and wrong: it is not stored
    assert PromptStore(folder / "damaged", fitted()[1]).match(np.array(both[1], np.uint32)) == 0


def test_a_full_disk_stores_nothing_and_text_goes_on(answers):
    folder, model, (*_, text), (*_, full), log = answers
    assert error(logprobs(model, text[0], full["tokens"][0]), full) < CLOSE
    assert "No space left on device" in log
    assert not list((folder / "full").rglob("*.kv"))


def test_other_processes_compiled_and_in_bfloat16(answers):
    folder, model, _, (_, exact, *_), _ = answers
    text = answers[2][0][0]
    own = store_job(folder, [text], dtype="bfloat16", enforce_eager=False)
    ((answer,), _) = by_vllm([own], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert answer["cached"] == exact["cached"][:1]
    precise, rounded = (
        logprobs(m, text, answer["tokens"][0], folder / "prompts") for m in (model, copy.deepcopy(model).bfloat16())
    )
    chosen = torch.tensor(answer["tokens"][0])[:, None]
    theirs, ours = torch.tensor(answer["logprobs"][0]), rounded.float().gather(1, chosen)[:, 0]
    precise = precise.gather(1, chosen)[:, 0]
    assert (theirs - precise).abs().max() < 3 * (ours - precise).abs().max()


def test_a_server_answers_requests_at_once_from_its_store(answers, tmp_path):
    folder, model, ((text, _), *_), (fresh, *_), _ = answers
    options = ["--prompt-store", folder / "prompts", "--codec", folder / "codec"]
    with serving(folder / "model", tmp_path / "log", "--enforce-eager", options=options) as (client, port):

        def ask(_):
            extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
            return client.completions.create(
                model="model", prompt=text, max_tokens=NEW, temperature=0, logprobs=1, extra_body=extra
            )

        with ThreadPoolExecutor(4) as pool:
            said = [answer.choices[0].logprobs for answer in pool.map(ask, range(4))]
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    hits = float(re.search(r"vllm:external_prefix_cache_hits_total\{.*\} (\S+)", metrics)[1])
    assert hits >= 512  # whole blocks of 128 tokens, from the disk at least once, then perhaps from memory
    for own in said:
        tokens = [int(name.removeprefix("token_id:")) for name in own.tokens]
        answer = {"tokens": [tokens], "logprobs": [own.token_logprobs]}
        assert error(logprobs(model, text, tokens, folder / "prompts", 512), answer) < CLOSE
