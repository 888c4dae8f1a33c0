"""Everything that a GPU should answer, in parts of at most 240 s, the most important part first.

    benchmarks/gpu/run.sh OUT [PART …] [--dry-run]
    benchmarks/gpu/run.sh --list

Without a PART, those of the default set run, which takes at most 9 minutes. A part writes OUT/PART.json row by row: one
that fails or is stopped leaves what it had, and the next call measures what is missing. Tables come last. Nothing is
downloaded: models have random weights in a real shape, or are trained here on the file $TOKENS that
`training_dynamics.py --prepare` made; without it, nothing is trained. --dry-run runs parts on a CPU with tiny shapes,
all of them if none is named.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "gpu"
MOST = 540  # seconds of the default set


@dataclass(frozen=True)
class Part:
    """A script with its arguments, the seconds that it may take, and what it answers."""

    name: str
    seconds: int
    command: str
    answers: str
    default: bool = False
    trains: bool = False


PARTS = [
    Part("uniattn", 150, "uniattn.py", "time to first token with maps kept, built again, and SDPA", True),
    Part("two_phase", 110, "two_phase.py", "reads of Attention Residuals in two phases against the fused kernel", True),
    Part("depth_attention", 80, "depth_attention.py", "errors and times of the fused kernel", True),
    Part("training", 120, "steps.py training", "training steps of Attention Residuals, 7B shape", True),
    Part("diagnosis", 70, "diagnosis.py", "a diagnosis over a forward pass", True),
    Part("serving", 110, "steps.py serving", "prompts and decoding with CLA, UniAttn and drop, 8B shape"),
    Part("stored_prompts", 170, "stored_prompts.py", "decoding of stored prompts against prefill"),
    Part("resformer", 240, "training_dynamics.py resformer", "sinks in ResFormer and SVFormer", trains=True),
    Part("equation7", 240, "training_dynamics.py equation7", "Eq. 7, NeuTRENO, vanilla; 150M tokens", trains=True),
    Part("attnres", 240, "training_dynamics.py attnres", "outputs and gradients over 24 layers", trains=True),
    Part("depth", 240, "training_dynamics.py depth", "depth connections at 24M parameters", trains=True),
]
assert all(part.seconds <= 240 for part in PARTS) and sum(part.seconds for part in PARTS if part.default) <= MOST


def last_run(part: Part) -> str:
    """Return when and on what a part ran whose record is committed."""
    file = RESULTS / f"{part.name}.json"
    if not file.exists():
        return "never"
    record = json.loads(file.read_text())
    return f"{record['date']}, {record['machine'].get('gpu') or 'no GPU'}"


def show() -> None:
    """Print the parts in order of worth."""
    print(f"{'part':16} {'seconds':>7}  {'default':7}  {'last run':42} answers")
    for part in PARTS:
        default = "yes" if part.default else "tokens" if part.trains else ""
        print(f"{part.name:16} {part.seconds:7}  {default:7}  {last_run(part):42} {part.answers}")


def run(part: Part, out: Path, dry: bool) -> bool:
    """Run a part within its time; return whether it ended well."""
    script, *words = part.command.split()
    command = [sys.executable, str(HERE / script), *words, "--json", str(out / f"{part.name}.json")]
    if dry:
        command.append("--dry-run")
    elif part.trains:
        command += ["--tokens", os.environ["TOKENS"], "--seconds", str(part.seconds - 25)]
    started = time.monotonic()
    log = out / f"{part.name}.log"
    with open(log, "w") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=part.seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
    taken = f"{time.monotonic() - started:.0f} s"
    if status == 0:
        print(f"{part.name}: done in {taken}", flush=True)
        log.unlink()
        return True
    how = f"stopped after {taken}; call again to continue" if status is None else f"FAILED after {taken}"
    print(f"{part.name}: {how}; its last lines:", *log.read_text().splitlines()[-5:], sep="\n  ", flush=True)
    return False


def main() -> None:
    """Run the parts that are asked for, then print the tables; the exit status says whether all ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--list", action="store_true", help="show the parts, and when each last ran")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    if options.list:
        show()
        return
    if options.out is None:
        parser.error("OUT must be a folder; --list shows the parts")
    names = [part.name for part in PARTS]
    unknown = [name for name in options.parts if name not in names]
    if unknown:
        parser.error(f"PART must be one of {', '.join(names)}; got {', '.join(unknown)}")
    chosen = [part for part in PARTS if part.name in options.parts]
    chosen = chosen or [part for part in PARTS if options.dry_run or part.default]
    if any(part.trains for part in chosen) and not options.dry_run and "TOKENS" not in os.environ:
        parser.error("TOKENS must be the file that training_dynamics.py --prepare made")
    options.out.mkdir(parents=True, exist_ok=True)
    ended = [run(part, options.out, options.dry_run) for part in chosen]
    subprocess.run([sys.executable, str(HERE / "table.py"), str(options.out)], check=False)
    print(f"{ended.count(False)} of {len(ended)} parts did not end")
    sys.exit(int(not all(ended)))


if __name__ == "__main__":
    main()
