"""Print the records of a run of `run.sh` as tables.

python benchmarks/gpu/table.py FOLDER
"""

import json
import sys
from pathlib import Path

from run import PARTS


def ratio(row: dict) -> str:
    """Return the ratio to the baseline, with its interval."""
    if row["interval"] is None:
        return f"{row['ratio']:.3f}"
    return f"{row['ratio']:.3f} ({row['interval'][0]:.3f}-{row['interval'][1]:.3f})"


def milliseconds(row: dict) -> str:
    """Return a time."""
    return f"{row['seconds'] * 1e3:.2f} ms"


def depth_attention(record: dict) -> None:
    """Print errors, and times over those of the bytes."""
    for count, row in record["rows"].items():
        for form, gaps in row["errors"].items():
            print(count, form, *(f"error of {key} {gap:.1e}" for key, gap in gaps.items()), sep=" | ")
        for form, kinds in row["times"].items():
            cells = [
                f"{kind} {milliseconds(time)} = {time['of_limit']:.2f} of its bytes" for kind, time in kinds.items()
            ]
            peak = row.get("allocated", {}).get(form)  # records before 2026-11-29 have none, and neither has a CPU
            print(count, form, *cells, *([] if peak is None else [f"allocates {peak / 2**20:.0f} MiB"]), sep=" | ")


def training(record: dict) -> None:
    """Print times over the plain decoder's, which were not taken in turns."""
    rows = record["rows"]
    for name, row in rows.items():
        if "error" in row:
            print(name, row["error"], sep=" | ")
            continue
        plain = rows["plain, compiled" if name.endswith("compiled") else "plain"]
        cells = [
            f"{kind} {milliseconds(row[kind])} = {row[kind]['seconds'] / plain[kind]['seconds']:.3f} of plain"
            for kind in ("training", "decoding")
            if kind in row and kind in plain
        ]
        memory = [] if row["peak_bytes"] is None else [f"{row['peak_bytes'] / 2**30:.1f} GiB"]
        print(name, *cells, *memory, sep=" | ")


def uniattn(record: dict) -> None:
    """Print each way's times and peaks beside the plain decoder's."""
    for name, row in record["rows"].items():
        cells = [f"{key} {milliseconds(value)} {ratio(value)}" for key, value in row.items()]
        peaks = [f"{value['peak_bytes'] / 2**30:.2f} GiB" for value in row.values() if value["peak_bytes"]]
        print(name, *cells, *peaks, sep=" | ")


def two_phase(record: dict) -> None:
    """Print the reads of each way over one phase, and as a share of the plain decoder's pass."""
    for name, row in record["rows"].items():
        for way, value in row.items():
            if way == "plain pass":
                continue
            cells = [f"{value['over_one_phase']:.3f} of one phase", f"{value['of_pass']:.4f} of a pass"]
            print(name, way, milliseconds(value), *cells, f"gap {value['gap']:.1e}", sep=" | ")


def serving(record: dict) -> None:
    """Print each method's times beside the plain decoder's."""
    for name, kinds in record["rows"].items():
        for kind, rows in kinds.items():
            cells = [f"{key} {milliseconds(row)} {ratio(row)}" for key, row in rows.items() if "seconds" in row]
            print(name, kind, *cells, sep=" | ")


def diagnosis(record: dict) -> None:
    """Print time and memory over a forward pass, by length."""
    for length, row in record["rows"].items():
        cells = [f"{key} {milliseconds(row[key])} {ratio(row[key])}" for key in ("forward", "diagnosis")]
        print(length, "tokens", *cells, row["peak_bytes"], sep=" | ")


def stored_prompts(record: dict) -> None:
    """Print times over those of prefill, by length."""
    print("error:", record.get("error"))
    for length, row in record["rows"].items():
        cells = [f"{key} {milliseconds(value)} {ratio(value)}" for key, value in row.items() if isinstance(value, dict)]
        print(length, "tokens", *cells, sep=" | ")


def training_dynamics(record: dict) -> None:
    """Print loss and the means over layers, by step."""
    for name, row in record["rows"].items():
        for entry in row["history"]:
            cells = [
                f"{key} {sum(value) / len(value):.3f}, most {max(value):.3f}"
                for key, value in entry.items()
                if isinstance(value, list)
            ]
            print(name, f"step {entry['step']}", f"loss {entry['loss']:.3f}", *cells, sep=" | ")


def main():
    """Print every record that is there."""
    parts = {part.__name__: part for part in (uniattn, two_phase, depth_attention, training, diagnosis)}
    parts |= {part.__name__: part for part in (serving, stored_prompts)}
    parts |= {part.name: training_dynamics for part in PARTS if part.trains}
    for name, part in parts.items():
        file = Path(sys.argv[1]) / f"{name}.json"
        if file.exists():
            record = json.loads(file.read_text())
            versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
            print(f"\n## {name}, {record['date']}, {record['machine']['gpu']}, {versions}")
            part(record)


if __name__ == "__main__":
    main()
