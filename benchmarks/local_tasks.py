"""Write lm-eval tasks that read local files.

    python benchmarks/local_tasks.py DATA OUT [--force]

Each task is lm-eval's own definition (`include:`) with another path of its data, so prompts and scores are the same.
DATA holds files TASK.SPLIT.jsonl (or .jsonl.gz) with the columns of the data set on the Hugging Face hub; SPLIT is
train, validation or test. It may also hold wikitext2_test.txt and wikitext2_valid.txt (raw text) and BLiMP.zip (the
release).
"""

import argparse
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from crosslayer.judge.tasks.harness import LOCAL, check_installed
from crosslayer.output.folder import whole_folder
from crosslayer.output.progress import print_to

SPLITS = {
    "training_split": "train",
    "validation_split": "validation",
    "test_split": "test",
}  # key of a task → of a file
HEADING = re.compile(r"^(?= = [^=].* = $)", re.M)  # of an article of WikiText; sections have more equals signs
LARGEST = 2**28  # bytes of a file inside BLiMP.zip


class Stock(NamedTuple):
    """A task of lm-eval: its file, further names of its data files, and changes to its definition."""

    file: str
    stems: tuple[str, ...] = ()
    changes: dict[str, Any] = {}


# the original data set has `answer` (true or false), its copy in SuperGLUE `label` (1 or 0)
BOOLQ = "{{ 1 if (answer if answer is defined else label) else 0 }}"
STOCK = {
    "hellaswag": Stock("hellaswag/hellaswag.yaml"),
    "piqa": Stock("piqa/piqa.yaml"),
    "arc_easy": Stock("arc/arc_easy.yaml"),
    "arc_challenge": Stock("arc/arc_challenge.yaml"),
    "openbookqa": Stock("openbookqa/openbookqa.yaml"),
    "winogrande": Stock("winogrande/default.yaml"),
    "social_iqa": Stock("siqa/siqa.yaml", ("social_i_qa", "siqa")),
    "commonsense_qa": Stock("commonsense_qa/default.yaml"),
    "boolq": Stock("super_glue/boolq/default.yaml", changes={"doc_to_target": BOOLQ}),
    "sciq": Stock("sciq/sciq.yaml"),
    "lambada_openai": Stock("lambada/lambada_openai.yaml"),
    "pubmedqa": Stock("pubmedqa/pubmedqa.yaml", ("pubmedqa_l",)),
    "medmcqa": Stock("medmcqa/medmcqa.yaml"),
    "medqa_4options": Stock("medqa/medqa.yaml"),
}
MEDQA = {  # with five options, which lm-eval lacks: columns question, options (A to E), answer_idx of its release
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\n{% for letter in ['A', 'B', 'C', 'D', 'E'] %}{{letter}}. "
    "{{options[letter]}}\n{% endfor %}Answer:",
    "doc_to_target": "answer_idx",
    "doc_to_choice": ["A", "B", "C", "D", "E"],
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}


def stock_folder() -> Path:
    """Return the folder of lm-eval's own tasks."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).resolve().parent / "tasks"


def write_local_tasks(data: str | Path, out: str | Path, force: bool = False) -> tuple[str, ...]:
    """Write a task for each known data set in a folder, and return their names.

    The files contain paths of the data and of lm-eval, so they are valid on this machine and environment only.

    Args:
        data: the folder of data.
        out: the folder to write, for `include_path`.
        force: replace an existing folder.

    Raises:
        ValueError: lm-eval is missing, the folder holds no known data, or `out` exists.

    """
    check_installed()
    source, target = Path(data).expanduser().resolve(), Path(out).expanduser().resolve()
    if not source.is_dir():
        raise ValueError(f"DATA must be a folder with files TASK.SPLIT.jsonl, got {str(data)!r}")
    with whole_folder(target, force) as folder:
        names = []
        for name, stock in STOCK.items():
            files = _files(source, (name, *stock.stems))
            if files:
                names.append(_write(folder, name, _including(stock_folder() / stock.file, files) | stock.changes))
        files = _files(source, ("medqa_5options", "medqa"))
        if files:
            splits = {field: split if split in files else None for field, split in SPLITS.items()}
            names.append(_write(folder, "medqa_5options", MEDQA | _data(files) | splits))
        names += _wikitext(source, folder, target) + _blimp(source, folder, target)
        if not names:
            raise ValueError(f"{source.name!r} has no known data files, such as arc_easy.test.jsonl")
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        # `force` only replaces folders whose files are listed in a manifest
        manifest = {"schema": "crosslayer/local-tasks/1", "tasks": names, "files": dict.fromkeys(files, "")}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return tuple(names)


def _files(source: Path, stems: tuple[str, ...]) -> dict[str, str]:
    """Return the first existing file of each split."""
    files = {}
    for stem in stems:
        pattern = re.compile(rf"{re.escape(stem)}\.({'|'.join(SPLITS.values())})\d*\.jsonl(\.gz)?")
        for path in sorted(source.iterdir()):
            match = pattern.fullmatch(path.name)
            if match:
                files.setdefault(match[1], str(path))
    return files


def _including(stock: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """Return a task that includes a stock task and replaces the path of its data and its splits without a file."""
    from lm_eval.tasks._yaml_loader import load_yaml

    own = load_yaml(stock, resolve_func=False)
    missing = [field for field in SPLITS if own.get(field) not in (None, *files)]
    return {"include": str(stock), **_data(files), **dict.fromkeys(missing)}


def _data(files: Mapping[str, str]) -> dict[str, Any]:
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": dict(files)}}


def _write(folder: Path, name: str, config: Mapping[str, Any]) -> str:
    """Write the file of a task or a group, and return its name."""
    local = name + LOCAL
    text = yaml.safe_dump({"task": local, **config}, sort_keys=False, allow_unicode=True)
    (folder / f"{local}.yaml").write_text(text, encoding="utf-8")
    return local


def _wikitext(source: Path, folder: Path, target: Path) -> list[str]:
    """Write WikiText-2 article by article, as in the data set on the hub."""
    files = {}
    for split, short in (("validation", "valid"), ("test", "test")):
        path, name = source / f"wikitext2_{short}.txt", f"wikitext2.{split}.jsonl"
        if path.is_file():
            pages = articles(path.read_text(encoding="utf-8-sig"))
            lines = "".join(json.dumps({"page": page}, ensure_ascii=False) + "\n" for page in pages)
            (folder / name).write_text(lines, encoding="utf-8")
            files[split] = str(target / name)
    if not files:
        return []
    return [_write(folder, "wikitext2", _including(stock_folder() / "wikitext/wikitext.yaml", files))]


def articles(text: str) -> list[str]:
    """Return the articles of WikiText's raw text, each with its heading."""
    return HEADING.split(text)[1:]


def _blimp(source: Path, folder: Path, target: Path) -> list[str]:
    """Write the 67 tasks of BLiMP and their group."""
    archive = source / "BLiMP.zip"
    if not archive.is_file():
        return []
    stock, names = stock_folder() / "blimp", []
    (folder / "blimp").mkdir()
    with zipfile.ZipFile(archive) as packed:
        for entry in sorted(packed.infolist(), key=lambda entry: entry.filename):
            name = Path(entry.filename).stem
            definition = stock / f"{name}.yaml"
            if not entry.filename.endswith(".jsonl") or not definition.is_file() or entry.file_size > LARGEST:
                continue
            (folder / "blimp" / f"{name}.jsonl").write_bytes(packed.read(entry))
            files = {"train": str(target / "blimp" / f"{name}.jsonl")}
            names.append(_write(folder, f"blimp_{name}", _including(definition, files)))
    if names:
        group = {"include": str(stock / "_blimp.yaml"), "group": f"blimp{LOCAL}", "task": list(names)}
        names.append(_write(folder, "blimp", group))
    return names


def main() -> None:
    """Write tasks for the folder on the command line, and print their names."""
    parser = argparse.ArgumentParser(prog="python benchmarks/local_tasks.py", description=__doc__)
    parser.add_argument("data", help="folder of files TASK.SPLIT.jsonl")
    parser.add_argument("out", help="folder to write, for crosslayer evaluate --allow-code --include-path")
    parser.add_argument("--force", action="store_true", help="replace the folder")
    options = parser.parse_args()
    try:
        names = write_local_tasks(options.data, options.out, options.force)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        print_to(sys.stderr, f"crosslayer: error: {' '.join(str(error).split())}")
        sys.exit(2)
    print_to(sys.stdout, "\n".join(names))


if __name__ == "__main__":
    main()
