"""Measures stored prompt caches: the codec, itself without each of its parts, and its rivals, on the same windows.

    python benchmarks/codecs.py smollm2 --out FILE [--text NAME=FILE …] [--fit-text NAME=FILE …] [--windows 4]
        [--prompt 640] [--continued 128] [--ways kvtc,codec@12.5 …] [--matrix [--share 6.25]] [--zone 0.1] [--save DIR]

A text is a file, a dataset, or an embedded domain. The exact model reads each prompt once. KL(exact ‖ stored) is in
nats per token over the next `--continued` tokens, and bytes are a share of the 16-bit cache. FILE is rewritten after
each way, and a second run skips the ways that it already has.

    codec@B                             at B % of the 16-bit cache; matrices are fitted at 12.5 %, or at a larger B
    depth@B metric@B steps@B entropy@B  the codec without this part
    kvtc@B aqua@BITS                    with exact tokens at the start, and at the end; KVTC has B % with four of them,
                                        and with 4 + 128 the same codes beside the exact tokens
    int@8 int@4 int@3 int@2 fp8         the package's quantized cache, with the tokens that it keeps exact, and as much
                                        memory as it allocates
    unrotated-int@4                     of keys before rotation and values, less their calibration mean

A ratio of the codec's KL to a rival's is the geometric mean over windows, with an interval over them. The rival's log
KL is interpolated over log bytes, window by window, and continued by 10 % at most. A rival without so few bytes is
taken with the fewest that it has.

`--matrix` instead fits a codec to each domain of `--text` alone and judges it on other windows of all of them. Steps
are set on text of all domains. The ratio is to the codec that is fitted to as many windows of all, at equal bytes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import qwen_1_5b  # noqa: F401  # makes qwen-1.5b known
import torch
from codec_rivals.paired import Prompts, matrix, ratios, row_of
from codec_rivals.ways import Made, Ways

import crosslayer
from crosslayer.codec import entropy
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import EMBEDDED, FIT_ONLY, FITTED, embedded_domains, shared_out, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.environment import environment
from crosslayer.probe.model import evaluating

HELD_OUT = 1  # windows of each domain that set the numbers of bytes
NEAR = (0.8, 1.0, 1.25)  # shares of the mixed fit of a matrix, in units of the others'
CUT = ("model", "windows", "prompt", "continued", "calibration", "length", "seed", "bos")
SETTINGS = (*CUT, "matrix", "share", "zone")


def domains_of(texts: Sequence[str], default: Sequence[str]) -> dict[str, Any]:
    """Return the documents of texts by domain."""
    found: dict[str, Any] = {}
    for text in texts or default:
        source = TextSource.named(text)
        is_embedded = text in EMBEDDED or text in FIT_ONLY
        name = text if is_embedded else source.describe()
        found[name] = embedded_domains([name])[name] if is_embedded else load_documents(source)
    return found


def cut(given: argparse.Namespace, tokenizer: Any) -> dict[str, Windows]:
    """Return the windows that are judged, those that set bytes, and those that are fitted to."""
    judged, fitted = (
        domains_of(given.text, ("science", "speeches", "code")),
        domains_of(given.fit_text, (*FITTED, *FIT_ONLY)),
    )
    if judged.keys() & fitted.keys():
        raise SystemExit(f"--text must differ from --fit-text, got {min(judged.keys() & fitted.keys())!r} twice")
    options: dict[str, Any] = {"tokenizer": tokenizer, "seed": given.seed, "bos": given.bos}
    parts = {"judged": dict.fromkeys(judged, given.windows), "held out": dict.fromkeys(judged, HELD_OUT)}
    if given.matrix:
        parts["own"] = dict.fromkeys(judged, given.calibration)
    found = split_domains(judged, parts=parts, length=given.prompt + given.continued, **options)
    counts = {"fit": shared_out(given.calibration, list(fitted))}
    return found | split_domains(fitted, parts=counts, length=given.length, **options)


def matrix_units(given: argparse.Namespace, model: Any, windows: dict[str, Windows]) -> dict[str, Callable[[], Made]]:
    """Return what fits a codec to each domain alone, to all of them, and to the text of `--fit-text`, by name."""
    own = {name: ids[:, : given.length] for name, ids in windows["own"].by_domain().items()}
    counts = shared_out(given.calibration, list(own))
    ids = {"mixed": torch.cat([ids[: counts[name]] for name, ids in own.items()]), **own}
    ids["+".join(dict.fromkeys(windows["fit"].domains))] = windows["fit"].ids
    held_out = windows["held out"].ids[:, : given.prompt]

    @cache
    def mixed() -> Ways:
        return Ways(model, ids["mixed"], held_out, given.prompt, given.seed)

    def fitted_to(name: str, budget: float) -> Made:
        ways = mixed() if name == "mixed" else Ways(model, ids[name], held_out, given.prompt, given.seed)
        made = ways.codec(budget)
        return Made({name: made.ways["codec"]}, made.parameters)

    made: dict[str, Callable[[], Made]] = {}
    for name in ids:
        for part in NEAR if name == "mixed" else (1.0,):
            budget = given.share * part
            made[f"{name}@{budget:g}"] = partial(fitted_to, name, budget)
    return made


def chosen(units: dict[str, Callable[[], Made]], names: str) -> dict[str, Callable[[], Made]]:
    """Return the units that are named, by themselves or with all their budgets."""
    wanted = [name for name in names.split(",") if name]
    known = units.keys() | {name.partition("@")[0] for name in units}
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--ways must be of {', '.join(sorted(known))}, got {name}")
    return {name: make for name, make in units.items() if not wanted or {name, name.partition("@")[0]} & set(wanted)}


def opened(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a file, or an empty one with these settings."""
    if not path.is_file():
        return {"settings": settings, "rows": [], "shared_seconds": {}, "environment": environment().model_dump()}
    record = json.loads(path.read_text())
    if record["settings"] != settings:
        raise SystemExit(f"--out must be a file of these settings, got {path.name} of others; give another file")
    return record


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    whole.replace(path)


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Return a value with its ends."""
    value, *ends = (f"{number:.{digits}g}" for number in values)
    return f"{value} ({'-'.join(ends)})" if ends else value


def table(record: dict[str, Any]) -> str:
    """Return the rows and the ratios as text."""
    lines = [f"{'way':<16}{'setting':>9}{'bytes':>9}  {'KL (95%)':<34}{'numbers':>9}{'fit':>9}{'coding':>10}"]
    for row in record["rows"]:
        facts = f"{row['way']:<16}{row['setting']:>9}{100 * row['share']:>8.2f}%  {interval(row['kl']):<34}"
        lines.append(
            facts + f"{row['parameters'] / 1e6:>8.2f}M{row['fit_seconds']:>8.1f}s{row['coding_seconds']:>9.1f}s"
        )
    for one in record.get("ratios", ()):
        at = f"{100 * one['share']:.2f} / {100 * one['other_share']:.2f} %"
        lines.append(f"codec@{one['codec']} / {one['other']:<14} {at:<18} {interval(one['ratio']):<26} "
                     f"better on {one['better_on']} of {one['of']}")  # fmt: skip
    for cell in record.get("matrix", ()):
        ratio = interval(cell["ratio"]) if "ratio" in cell else "–"
        lines.append(f"{cell['fitted']:<18} on {cell['tested']:<12}{100 * cell['share']:>7.2f}%  "
                     f"{cell['kl']:.3g}  × {ratio}")  # fmt: skip
    if "worst" in record:
        worst = record["worst"]
        lines.append(f"worst: fitted on {worst['fitted']}, tested on {worst['tested']}: × {interval(worst['ratio'])}")
    return "\n".join(lines)


def run(given: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Measure what `--out` does not have yet, and return its record."""
    windows = cut(given, tokenizer)
    judged = windows["judged"]
    settings = {name: vars(given)[name] for name in SETTINGS}
    settings |= {"text": list(dict.fromkeys(judged.domains)), "fit_text": list(dict.fromkeys(windows["fit"].domains))}
    record = opened(given.out, settings)
    record |= {"domains": judged.domains, "documents": judged.documents}
    held_out = windows["held out"].ids[:, : given.prompt]
    ways = Ways(model, windows["fit"].ids, held_out, given.prompt, given.seed, tokenizer)
    units = chosen(matrix_units(given, model, windows) if given.matrix else ways.units(), given.ways)
    missing = {name: make for name, make in units.items() if name not in {row["unit"] for row in record["rows"]}}
    raw = given.prompt * 2 * sum(shape.width for shape in ways.shapes)
    with tempfile.TemporaryDirectory() as folder, evaluating(model):
        prompts = Prompts(model, judged.ids, given.prompt, Path(folder))
        if missing:
            record["exact_seconds"] = round(prompts.read(), 1)
        for unit, make in missing.items():
            started, before = time.process_time(), sum(ways.seconds.values())
            made = make()
            fitted = time.process_time() - started - (sum(ways.seconds.values()) - before)
            found, took = prompts.measure(made.ways)
            for way, values in found.items():
                facts = {"parameters": made.parameters, "fit_seconds": round(fitted, 1)}
                row = row_of(way, unit, values, raw, judged.documents)
                record["rows"].append(row | facts | {"coding_seconds": round(took[way], 1)})
            record["shared_seconds"] |= ways.seconds
            summarize(record, given)
            write(record, given.out)
            if given.save and unit in ways.codecs:
                ways.codecs[unit].save(given.save / unit)
            print(f"{unit}: {time.process_time() - started:.0f} s", flush=True)
    return record


def summarize(record: dict[str, Any], given: argparse.Namespace) -> None:
    """Add paired ratios, or the matrix with its worst cell, to a record."""
    rows, documents = record["rows"], record["documents"]
    if not given.matrix:
        record["ratios"] = ratios(rows, documents)
        return
    record["matrix"] = matrix(rows, record["domains"], documents, given.share)
    cells = [cell for cell in record["matrix"] if "ratio" in cell and cell["tested"] != "all"]
    if cells:
        record["worst"] = max(cells, key=lambda cell: cell["ratio"][0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", action="append", default=[], help="judged on; default science, speeches, code")
    parser.add_argument("--fit-text", action="append", default=[], help="fitted to; default that of fit-codec")
    parser.add_argument("--windows", type=int, default=4, help="of each domain")
    parser.add_argument("--prompt", type=int, default=640, help="tokens that are stored")
    parser.add_argument("--continued", type=int, default=128, help="tokens behind them")
    parser.add_argument("--calibration", type=int, default=48, help="windows that are fitted to")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bos", default="auto")
    parser.add_argument("--ways", default="", help="such as kvtc,codec@12.5; default all")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--share", type=float, default=6.25, help="of --matrix, in percent")
    parser.add_argument("--zone", type=float, default=entropy.ZONE, help="of all codes, in steps")
    parser.add_argument("--save", type=Path, help="folder in which the fitted codecs are kept, as codec@12.5")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    entropy.ZONE = given.zone
    model, tokenizer = crosslayer.load_model(given.model)
    print(table(run(given, model, tokenizer)))


if __name__ == "__main__":
    main()
