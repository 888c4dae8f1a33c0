"""Peak memory of a whole `crosslayer retrofit`, with its report, and of `crosslayer diagnose`: a Llama of 1.07B.

    python benchmarks/memory.py [--folder FOLDER] [--only NAME …]

The model (random, 16 layers, hidden 2048, bfloat16, 2.14 GB in shards) is written to FOLDER, or to a temporary one.
Each command is a process of its own. "peak" is the most that was resident (VmHWM), "own" the most without mapped files
(RssAnon, read every 20 ms). Windows are short, so that a CPU gets through them: what grows with them is not in it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "memory.json"
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 24_000, "max_position_embeddings": 2048,
}  # fmt: skip
WINDOWS = ["--windows", "16", "--length", "16", "--dtype", "bfloat16"]
FITTED = ["--calibration", "292"]  # hardly more than W_c needs
COMMANDS = {
    "uniattn": ["retrofit", "--method", "uniattn", *WINDOWS, *FITTED],
    "cla": ["retrofit", "--method", "cla", *WINDOWS, *FITTED],
    "drop": ["retrofit", "--method", "drop", "--compensation", "none", *WINDOWS],
    "diagnose": ["diagnose", "--sequences", "2", "--length", "64", "--dtype", "bfloat16"],
}


def write_model(folder: Path) -> None:
    """Write the random model with a tokenizer of bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from crosslayer.training.tokenizers import make_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")
    make_tokenizer("bytes", list).save_pretrained(folder)


def run(words: list[str], model: Path, out: Path) -> dict:
    """Run a command on the model, and return its seconds and its peaks in bytes."""
    text = out.with_name("text.txt")
    text.write_text("".join(chr(97 + place * place % 23) + " " * (place % 5 == 0) for place in range(40_000)))
    command = [sys.executable, "-m", "crosslayer", words[0], str(model), *words[1:]]
    started, own, peak = time.perf_counter(), 0, 0
    with out.with_name("log.txt").open("w") as log:
        process = subprocess.Popen([*command, "--text", str(text), "--out", str(out)], stdout=log, stderr=log)
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                break
            sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
            own, peak = max(own, sizes.get("RssAnon:", 0)), max(peak, sizes.get("VmHWM:", 0))
            time.sleep(0.02)
    if process.wait():
        raise SystemExit(out.with_name("log.txt").read_text()[-2000:])
    return {"command": words, "seconds": time.perf_counter() - started, "peak": peak, "own": own}


def measure(model: Path, names: list[str]) -> None:
    """Run the commands and write what they took."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory(dir=model.parent) as folder:
            runs[name] = run(COMMANDS[name], model, Path(folder) / "out")
        over = runs[name]["peak"] - 2 * weights
        print(
            f"{name}: peak {runs[name]['peak'] / 1e9:.2f} GB, without files {runs[name]['own'] / 1e9:.2f} GB, "
            f"{over / 1e9:+.2f} GB to twice the weights; {runs[name]['seconds']:.0f} s",
            flush=True,
        )
    from crosslayer.environment import environment

    result = {"shape": SHAPE, "weights": weights, "runs": runs, "environment": environment().model_dump()}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the model is kept for another run")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = (args.folder or Path(temporary)) / "model"
        if not model.exists():
            write_model(model)
        measure(model, args.only)


if __name__ == "__main__":
    main()
