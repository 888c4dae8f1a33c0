"""Attention over depth on a GPU: whether its kernels are right, and how near its time is to that of its bytes.

    python benchmarks/gpu/depth_attention.py [--dry-run] [--json FILE]

Right: result and gradients of the operator in bfloat16, and of its definition in bfloat16, against the definition in
float64 on the same numbers. Times: one reader over N sources, forward and backward (two passes over the sources, and
one over the reader's gradient for each), beside the time of the bytes at the memory's measured bandwidth, and what they
allocate; where flash-linear-attention is installed (`pip install fla-core einops`), its operator on the same sources,
in turns, also with the norm behind a read, which it fuses.
"""

import importlib.util
from statistics import median

import torch
from common import arguments, resumed, save, seconds

from crosslayer.core.depth_attention import depth_attention, keep, listed
from crosslayer.core.sources import Sources
from crosslayer.stats.times import paired_ratio

EPS = 1e-6
REPEATS = 20
LISTED = 33  # the definition keeps several copies of all sources: more do not fit


def drawn(count, tokens, width, device, dtype):
    """Return sources (T, C), a direction with scores of order 1, and a gradient."""
    generator = torch.Generator(device).manual_seed(count)
    options = {"device": device, "generator": generator}
    sources = [torch.randn(tokens, width, **options).to(dtype) for _ in range(count)]
    direction = (torch.randn(width, **options) / width**0.5).to(dtype)
    return sources, direction, torch.randn(tokens, width, **options).to(dtype)


def by_operator(sources, direction):
    """Read sources that were kept, as a model does."""
    kept = Sources()
    for source in sources:
        kept = keep(source, kept, len(sources))
    return depth_attention(kept, direction, EPS)


def by_definition(sources, direction):
    return listed(sources, direction, EPS)


def by_fla(sources, direction):
    """Read with flash-linear-attention's operator, whose query and gain are separate."""
    from fla.ops.attnres import fused_attnres

    return fused_attnres(direction, sources, torch.ones_like(direction), rms_eps=EPS)


def with_norm(form):
    """Return a form that is followed by the norm of the sublayer that reads."""
    return lambda sources, direction: torch.nn.functional.rms_norm(form(sources, direction), direction.shape, eps=EPS)


def by_fla_with_norm(sources, direction):
    from fla.ops.attnres import fused_attnres

    ones = torch.ones_like(direction)
    return fused_attnres(direction, sources, ones, output_rms_weight=ones, rms_eps=EPS)


def evaluate(form, sources, direction, grad):
    """Return the result and the gradients of sources and direction."""
    leaves = [tensor.detach().requires_grad_() for tensor in (*sources, direction)]
    result = form(leaves[:-1], leaves[-1])
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def errors(forms, count, tokens, width, device):
    """Return for each form the largest error of result, sources' gradients and direction's, over the largest value."""
    drawn_tensors = drawn(count, tokens, width, device, torch.bfloat16)
    sources, direction, grad = drawn_tensors
    wide = [source.double() for source in sources], direction.double(), grad.double()
    expected, rows = evaluate(by_definition, *wide), {}
    for name, form in forms.items():
        gaps = [
            ((one.double() - other).abs().max() / other.abs().max()).item()
            for one, other in zip(evaluate(form, sources, direction, grad), expected, strict=True)
        ]
        rows[name] = {"result": gaps[0], "sources": max(gaps[1:-1]), "direction": gaps[-1]}
    return rows


def bandwidth(device, elements):
    """Return the bytes a second of a copy that is larger than any cache."""
    one, other = torch.empty(2, elements, device=device)
    times = [seconds(lambda: one.copy_(other), device) for _ in range(REPEATS)]
    return 2 * one.nbytes / median(times)


def allocated(form, count, tokens, width, device):
    """Return the peak bytes of forward and backward beyond the sources, gradients included; None without a GPU."""
    if device != "cuda":
        return None
    sources, direction, grad = drawn(count, tokens, width, device, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    evaluate(form, sources, direction, grad)
    return torch.cuda.max_memory_allocated() - before


def timed(forms, count, tokens, width, device, rate):
    """Return each form's times forward and backward, in turns, and those of the operator's bytes."""
    sources, direction, grad = drawn(count, tokens, width, device, torch.bfloat16)
    times = {name: {"forward": [], "both": []} for name in forms}
    for repeat in range(-2, REPEATS):
        for name in list(forms) if repeat % 2 else list(forms)[::-1]:
            with torch.no_grad():
                forward = seconds(lambda form=forms[name]: form(sources, direction), device)
            both = seconds(lambda form=forms[name]: evaluate(form, sources, direction, grad), device)
            if repeat >= 0:
                times[name]["forward"].append(forward)
                times[name]["both"].append(both)
    size = sources[0].nbytes
    limits = {"forward": (count + 1) * size / rate, "both": (5 * count + 2) * size / rate}
    return {
        name: {
            kind: {
                "seconds": median(entries),
                "spread": [min(entries), max(entries)],
                "of_limit": median(entries) / limits[kind],
                "ratio_to_operator": paired_ratio(entries, times["operator"][kind]).model_dump(),
            }
            for kind, entries in kinds.items()
        }
        for name, kinds in times.items()
    }


def main():
    """Check and time, the fewest sources first; write the file after each."""
    options = arguments(__doc__).parse_args()
    device = "cpu" if options.dry_run else "cuda"
    tokens, width = (16, 64) if options.dry_run else (8192, 4096)
    counts = (2, 9) if options.dry_run else (2, 9, 33, 65, 129)
    forms = {"operator": by_operator, "definition": by_definition}
    if importlib.util.find_spec("fla") is not None and device == "cuda":
        forms |= {"flash-linear-attention": by_fla, "operator, norm": with_norm(by_operator)}
        forms["flash-linear-attention, norm"] = by_fla_with_norm
    record = resumed(options.json, tokens=tokens, width=width)
    record["bytes_per_second"] = rate = bandwidth(device, 1 << (16 if options.dry_run else 28))
    for count in counts:
        if str(count) in record["rows"]:
            continue
        alone = {name: form for name, form in forms.items() if not name.endswith("norm")}
        gaps = errors(alone, count, min(tokens, 256), width, device)
        some = {name: form for name, form in forms.items() if name != "definition" or count <= LISTED}
        memory = {name: allocated(form, count, tokens, width, device) for name, form in some.items()}
        times = timed(some, count, tokens, width, device, rate)
        record["rows"][str(count)] = {"errors": gaps, "times": times, "allocated": memory}
        print(f"{count} sources:", record["rows"][str(count)], flush=True)
        save(options.json, record)


if __name__ == "__main__":
    main()
