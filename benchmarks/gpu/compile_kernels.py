"""Registers, spills, shared memory and compile times of all kernels, compiled ahead of time for several GPUs.

    python benchmarks/gpu/compile_kernels.py [--sources 64] [--json FILE]

It needs Triton and no GPU. The wrappers run on meta tensors with recorders instead of their kernels, so that blocks,
warps and padding are those of a launch; pointers are taken as aligned to 16 bytes, as those of whole tensors are.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crosslayer.core.kernels import depth_attention, pages

TARGETS = (80, 90, 100)
CASES = ((torch.bfloat16, 4096), (torch.float32, 1024))  # dtype and width
TOKENS = 8192
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


class Recorder:
    """Takes a kernel's launches and keeps their sources and options for the compiler."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches: list[tuple[ASTSource, dict]] = []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **keywords):
        """Keep a launch."""
        parameters = self.kernel.params
        named = dict(zip([parameter.name for parameter in parameters], arguments, strict=False))
        options = {name: value for name, value in keywords.items() if name not in self.kernel.arg_names}
        named |= {name: value for name, value in keywords.items() if name in self.kernel.arg_names}
        constant = {p.name for p in parameters if p.is_constexpr or named[p.name] is None}
        signature = {name: "constexpr" if name in constant else signed(named[name]) for name in self.kernel.arg_names}
        aligned = {}
        for index, name in enumerate(self.kernel.arg_names):
            paths = (
                [(index, item) for item in range(len(named[name]))] if isinstance(named[name], tuple) else [(index,)]
            )
            if "*" in str(signature[name]):
                aligned |= {path: [["tt.divisibility", 16]] for path in paths}
        source = ASTSource(self.kernel, signature, {name: named[name] for name in constant}, aligned)
        self.launches.append((source, options))


def signed(argument) -> str | tuple:
    """Return the type of an argument in a signature."""
    if isinstance(argument, tuple):
        return tuple(signed(item) for item in argument)
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    return "fp32" if isinstance(argument, float) else "i32"


def record(module, name: str, call: Callable[[], object]) -> tuple[ASTSource, dict]:
    """Return what a call of a wrapper hands to a kernel."""
    recorder = Recorder(getattr(module, name))
    with mock.patch.object(module, name, recorder):
        call()
    (launch,) = recorder.launches
    return launch


def launches(dtype: torch.dtype, width: int, count: int) -> dict[str, tuple[ASTSource, dict]]:
    """Return the launches of depth attention over so many sources or readers."""
    with torch.device("meta"):
        tensors = [torch.empty(TOKENS, width, dtype=dtype) for _ in range(count)]
        table, directions = torch.empty(count, TOKENS), torch.empty(count, width)
        shrink = torch.empty(TOKENS)
    one, module = tensors[0], depth_attention
    calls = {
        "attend_kernel": lambda: module.attend(tensors, directions[0], 1e-6),
        "attend_kernel, normed": lambda: module.attend(tensors, directions[0], 1e-6, True),
        "differentiate_kernel": lambda: module.differentiate(one, table, table, tensors, directions[0]),
        "differentiate_kernel, normed": lambda: module.differentiate(one, table, table, tensors, directions[0], True),
        "gradient_kernel": lambda: module.gradient(one, tensors, table, table, shrink, directions, one),
    }
    return {name: record(module, name.partition(",")[0], call) for name, call in calls.items()}


def page_launches() -> dict[str, tuple[ASTSource, dict]]:
    """Return the launches that read pages of stored prompts."""
    with torch.device("meta"):
        words, facts, rows, nodes, bins = (torch.empty(shape, dtype=torch.int32) for shape in (8, (9, 8), 8, 8, 8))
        codes, coefficients = torch.empty(8, 8, dtype=torch.int16), torch.empty(8, 8, dtype=torch.float16)
        scales = torch.empty(8), torch.empty(8)
    return {
        "read_kernel": record(pages, "read_kernel", lambda: pages.read(words, facts, rows, nodes, bins, codes)),
        "read_kernel, scaled": record(
            pages, "read_kernel", lambda: pages.read(words, facts, rows, nodes, bins, coefficients, scales)
        ),
    }


def measure(source: ASTSource, options: dict, architecture: int) -> dict:
    """Compile a launch; return what it uses. A stack is there only for spilled registers."""
    start = time.perf_counter()
    with mock.patch.object(triton.knobs.compilation, "always_compile", True):
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    seconds = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (usage,) = USAGE.findall(text)
    return {
        "warps": options["num_warps"],
        "registers": int(usage[0]),
        "spilled_bytes": int(usage[1]),
        "shared_bytes": compiled.metadata.shared,
        "seconds": round(seconds, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent.parent / "results" / "kernels.json")
    options = parser.parse_args()
    cases = [
        ({"dtype": TYPES[dtype], "width": width, "count": options.sources}, launches(dtype, width, options.sources))
        for dtype, width in CASES
    ]
    cases.append(({"dtype": "fp16", "width": None, "count": None}, page_launches()))
    rows = []
    print("| GPU | kernel | dtype | C | N, R | warps | registers | spilled bytes | shared bytes | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for architecture in TARGETS:
        for case, kernels in cases:
            for name, launch in kernels.items():
                row = {"target": f"sm_{architecture}", "kernel": name, **case}
                try:
                    row |= measure(*launch, architecture)
                except Exception as error:  # a target that this compiler lacks
                    row["error"] = str(error).splitlines()[0]
                rows.append(row)
                print("|", " | ".join("-" if value is None else str(value) for value in row.values()), "|", flush=True)
    record = {"date": date.today().isoformat(), "triton": triton.__version__, "rows": rows}
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
