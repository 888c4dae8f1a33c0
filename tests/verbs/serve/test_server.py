"""A real server: `crosslayer serve` of retrofits of SmolLM2, asked over HTTP by the `openai` client."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import crosslayer
from crosslayer.verbs.serve.engine import GRACE
from tests.core.decoder.test_sharded import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see make test-serving"),
]
TEXTS = ["Call me Ishmael. Some years ago", "def fibonacci(n):", "The three laws of motion are", "A recipe for bread:"]
NEW, CLOSE = 16, 1e-3
START = 900  # seconds that a server may take to start, on slow machines
MEMORY, BLOCK = 0.25, 128  # GiB of cache, and tokens in each of vLLM's blocks on a CPU


@pytest.fixture(scope="module")
def smollm2():
    return crosslayer.load_model("smollm2", dtype="float32")


def retrofit(smollm2, folder, method):
    """A folder with a retrofit whose W_c, where there is one, is random, so that it counts."""
    model, tokenizer = smollm2
    converted = crosslayer.convert(model, method, fit="zero" if "compensation" in method else None).model
    with torch.no_grad():
        for name, parameter in converted.named_parameters():
            if "compensation" in name:
                parameter.normal_(0, 0.003, generator=torch.Generator().manual_seed(0))
    converted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return converted.eval()


@contextmanager
def serving(folder, log, *flags, options=()):
    """A server of a folder, and the client that talks to it; it is interrupted at the end, and ends."""
    import openai

    port = free_port()
    words = [
        "serve",
        folder,
        "--port",
        port,
        "--dtype",
        "float32",
        "--max-length",
        1024,
        "--kv-memory",
        MEMORY,
        *options,
    ]
    words += ["--", *flags] if flags else []
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "crosslayer", *map(str, words)], stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START
        while not healthy(port):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none"), port
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise
    assert not healthy(port)


def healthy(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def kv_blocks(port):
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return int(re.search(r'vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', text)[1])


@torch.no_grad()
def check(model, tokenizer, text, choice):
    """The server's tokens are the likeliest of ours, and its log probabilities ours."""
    prompt = tokenizer(text).input_ids
    said = choice.logprobs.token_logprobs
    ids = prompt + [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens]
    ours = model(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)  # (NEW, V)
    for row, token, logprob in zip(ours, ids[len(prompt) :], said, strict=True):
        best, second = row.topk(2).values
        assert token == row.argmax() or best - second < CLOSE
        assert abs(row[token] - logprob) < CLOSE


METHODS = {
    "cla": {"name": "cla"},
    "searched": {"name": "drop", "attention": (6, 7, 17, 22, 25), "compensation": "attention"},
}


@pytest.mark.parametrize(("method", "share"), [("cla", 15 / 30), ("searched", 25 / 30)])
def test_a_server_gives_our_tokens_and_holds_what_the_plan_says(smollm2, tmp_path, method, share):
    flags = ["--enforce-eager"] if method == "searched" else []  # the other is compiled, as vLLM does by default
    model = retrofit(smollm2, tmp_path / method, METHODS[method])
    tokenizer = smollm2[1]
    with serving(tmp_path / method, tmp_path / "log", *flags) as (client, port):
        options = {"model": method, "max_tokens": NEW, "temperature": 0, "logprobs": 1}
        extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}

        def complete(text):
            return client.completions.create(prompt=text, **options, extra_body=extra).choices[0]

        for text in TEXTS:
            check(model, tokenizer, text, complete(text))
        with ThreadPoolExecutor(16) as pool:  # 16 at once
            choices = list(pool.map(complete, TEXTS * 4))
        for text, choice in zip(TEXTS * 4, choices, strict=True):
            check(model, tokenizer, text, choice)
        streamed = client.completions.create(prompt=TEXTS[0], **options, extra_body={"ignore_eos": True}, stream=True)
        plain = client.completions.create(prompt=TEXTS[0], **options, extra_body={"ignore_eos": True})
        assert "".join(part.choices[0].text for part in streamed) == plain.choices[0].text
        block = 30 * share * 2 * 3 * 64 * 4 * BLOCK  # layers, keys and values, heads, their size, bytes of float32
        assert kv_blocks(port) == int(MEMORY * 2**30 / block)


def test_an_export_is_served_and_ctrl_c_ends_its_streams(smollm2, tmp_path):
    """Its class is vLLM's own, the class of its config our plugin's; the code in the folder does not run."""
    import httpx
    import openai

    model = retrofit(smollm2, tmp_path / "dropped", {"name": "drop", "attention": (6, 17, 25)})
    crosslayer.export(tmp_path / "dropped", tmp_path / "deci", to="deci", dtype="float32")
    (tmp_path / "deci" / "configuration_decilm.py").write_text("raise SystemExit")
    with serving(tmp_path / "deci", tmp_path / "log", "--enforce-eager") as (client, port):
        options = {"model": "deci", "temperature": 0}
        extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
        for text in TEXTS:
            answer = client.completions.create(prompt=text, max_tokens=NEW, logprobs=1, **options, extra_body=extra)
            check(model, smollm2[1], text, answer.choices[0])
        assert kv_blocks(port) == int(MEMORY * 2**30 / (27 * 2 * 3 * 64 * 4 * BLOCK))
        stream = client.completions.create(prompt=TEXTS[0], max_tokens=1000, stream=True, **options, extra_body=extra)
        next(stream)
        told = time.monotonic()
    with pytest.raises((openai.APIError, httpx.TransportError)):  # not the client's own time-out, of ten minutes
        list(stream)
    assert time.monotonic() - told < 2 * GRACE


@pytest.mark.filterwarnings("ignore")  # what vLLM's imports raise
def test_bench_of_a_retrofit_beside_the_original(smollm2, tmp_path):
    retrofit(smollm2, tmp_path / "cla", METHODS["cla"])
    benchmark = crosslayer.bench(
        tmp_path / "cla", "smollm2", engine="vllm", contexts=[64], batches=[4], new_tokens=8, repeats=5, kv_memory=0.125
    )
    capacity, throughput, _ = benchmark.rows
    assert capacity.change.value == pytest.approx(2, rel=0.05)  # whole blocks of 128 tokens, of 3,240
    assert throughput.change.interval is not None and throughput.value > 0
    benchmark.save(tmp_path / "out")
    assert crosslayer.load_result(tmp_path / "out") == benchmark
    assert "too small" not in " ".join(benchmark.sentences())
