"""The reads of Attention Residuals in one phase and in two, under CUDA graphs, beside a pass of the plain decoder.

    python benchmarks/gpu/two_phase.py --json FILE [--dry-run]

7B shape: 64 sublayers, the full form and eight blocks; a prompt of 8,192 tokens, and decoding steps of 1 and 32
sequences. Reads alone, on random outputs of sublayers: *one phase* is the fused kernel, *two phases* the plain
operators that CPUs run, *two phases, compiled* the same through torch.compile. `plain pass` is what all layers of the
plain decoder take for as many tokens, without a cache; `of_pass` are the reads as a share of it.
"""

import torch
from common import SHAPE_7B, TINY, arguments, build, freed, in_turns, resumed, save, seconds

from crosslayer.core.depth_attention import two_phase

CASES = {"prompt": (1, 8192), "decoding": (1, 1), "decoding, batch 32": (32, 1)}
FORMS = {"full": None, "8 blocks": 8}
WAYS = ("one phase", "two phases", "two phases, compiled")


def readers(shape: dict, block: int | None, device: str, dtype: torch.dtype) -> list[torch.nn.Module]:
    """Return the readers of a model in order; the rest of it is small."""
    small = {**shape, "vocab_size": 256, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    small |= {"head_dim": 8}
    model = build(small, [{"name": "attnres", "block": block, "query_init": 0.02}], device, dtype)
    sites = [(layer.attn_residual, layer.mlp_residual) for layer in model.model.layers]
    return [*(reader for pair in sites for reader in pair), model.model.final_residual]


@torch.no_grad()
def read_all(modules: list[torch.nn.Module], outputs: list[torch.Tensor]) -> torch.Tensor:
    """Let each reader read, and each sublayer write an output that is given; return the last read."""
    stream, carry, read = outputs[0], {}, outputs[0]
    for reader, output in zip(modules, outputs[1:], strict=True):
        read, carry = reader(stream, carry)
        stream, carry = reader(stream, carry, output)
    return read


def read_in(way: str, plain: tuple) -> None:
    """Choose how readers read: one of `WAYS`."""
    two_phase.pays = lambda source: way != "one phase"
    compiled = way.endswith("compiled")
    two_phase.read_ahead, two_phase.merge = (torch.compile(one, dynamic=False) if compiled else one for one in plain)


def captured(call, device: str):
    """Return a call that replays a CUDA graph of another; on a CPU, or if it cannot be captured, the call itself."""
    if device != "cuda":
        return call
    try:
        return _graph_of(call)
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return call


def _graph_of(call):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main():
    """Measure every form and number of tokens; write the file after each."""
    options = arguments(__doc__).parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    shape, pairs = (SHAPE_7B, 9) if not options.dry_run else (TINY, 2)
    two_phase.AT_ONCE = 1 << 28  # elements that are copied at a time: a GPU has no cache to stay in
    torch._dynamo.config.recompile_limit = 256  # a graph for each number of sources
    plain_functions = two_phase.read_ahead, two_phase.merge
    record = resumed(options.json, shape=shape)
    body = build(shape, [], device, dtype).model
    for name, (batch, tokens) in CASES.items():
        tokens = min(tokens, 32) if options.dry_run else tokens
        for form, block in FORMS.items():
            key = f"{name}, {form}"
            if key in record["rows"]:
                continue
            modules = readers(shape, block, device, dtype)
            outputs = [
                torch.randn(batch, tokens, shape["hidden_size"], device=device, dtype=dtype)
                for _ in range(len(modules) + 1)
            ]
            ids = torch.randint(0, 256, (batch, tokens), device=device)
            with torch.no_grad():
                calls = {"plain pass": captured(lambda i=ids: body(i, use_cache=False), device)}
                results = {}
                for way in WAYS[:2] if options.dry_run else WAYS:
                    read_in(way, plain_functions)
                    results[way] = read_all(modules, outputs)

                    def run(w=way, m=modules, o=outputs):
                        read_in(w, plain_functions)  # a graph replays the way that it was captured in
                        return read_all(m, o)

                    calls[way] = captured(run, device)
            row = in_turns({way: lambda c=call: seconds(c, device) for way, call in calls.items()}, pairs)
            for way, result in results.items():
                gap = (result.float() - results[WAYS[0]].float()).abs().max() / results[WAYS[0]].float().abs().max()
                row[way] |= {"of_pass": row[way]["ratio"], "gap": float(gap)}
                row[way]["over_one_phase"] = row[way]["seconds"] / row[WAYS[0]]["seconds"]
            record["rows"][key] = row
            print(key, row, flush=True)
            save(options.json, record)
            del modules, outputs, calls, results
            freed(device)


if __name__ == "__main__":
    main()
