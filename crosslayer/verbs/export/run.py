"""Write a model in a form that needs no crosslayer."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.weights import to_config
from crosslayer.environment import quiet_transformers
from crosslayer.models.load import load_config, ready_model
from crosslayer.models.origin import origin
from crosslayer.output.folder import check_target, whole_folder
from crosslayer.output.manifest import write_manifest
from crosslayer.output.progress import Meter, Silent
from crosslayer.verbs.export import decilm, stock
from crosslayer.verbs.export.card import export_card
from crosslayer.verbs.export.layers import left
from crosslayer.verbs.export.refusals import check_form, check_name
from crosslayer.verbs.export.result import Exported
from crosslayer.verbs.retrofit.title import title

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def export(
    model: PreTrainedModel | str | Path,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    to: str,
    dtype: str | torch.dtype | None = None,
    force: bool = False,
    progress: Meter = Silent,
) -> Exported:
    """Write a model in a form that needs no crosslayer, with a card and a manifest.

    Whole layers of which nothing is left are not written; those behind them move up.

    Args:
        model: a retrofit's folder, another local folder, a hub name, or smollm2. In Python also a loaded model.
        out: folder for the model, its card and its manifest.
        tokenizer: in Python, of a loaded model.
        to: hf (a stock class of transformers, Llama where that fits), deci (vLLM's DeciLM) or gguf (llama.cpp).
        dtype: float32, bfloat16 or float16; default as the weights are stored.
        force: replace a folder that crosslayer wrote.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: the model has no such form (the message names what is in the way, and the forms that it has), it
            cannot be loaded, or the folder cannot be written.

    """
    check_name(to)
    check_target(Path(out), force)
    named = not isinstance(model, PreTrainedModel)
    config = load_config(str(model)) if named else model.config
    translated = _as_ours(config, to)
    if translated is not None:
        check_form(translated, to)
    if named and dtype is None:
        dtype = config.dtype or torch.float32
    loaded, words, name, _ = ready_model(model, tokenizer, dtype=dtype, device="cpu" if named else None, meter=progress)
    if not loaded.can_generate():
        raise ValueError(f"export needs a causal LM; {type(loaded).__name__} is none")
    if loaded.dtype not in DTYPES:
        raise ValueError(f"`dtype` is {loaded.dtype}; weights are written in float32, bfloat16 or float16")
    folder = Path(str(model)).expanduser() if named else None
    with whole_folder(Path(out), force) as partial, progress(f"writing {to}", 0):
        written, facts = _write(loaded, translated, words, to, name, partial)
        card = folder / "README.md" if folder is not None else None
        source = card.read_text(encoding="utf-8") if card is not None and card.is_file() else None
        methods = title(loaded.config.methods) if isinstance(loaded.config, CrossLayerConfig) else ""
        head = f"# {name}\n\n{methods or 'No methods.'}"
        text = export_card(source, head, to, origin(model), words is not None)
        (partial / "README.md").write_text(text, encoding="utf-8")
        write_manifest(partial, written)  # its logits on fixed ids stand for what other programs must compute
        size = sum(path.stat().st_size for path in partial.rglob("*"))
    dtype_name = str(loaded.dtype).removeprefix("torch.")
    return Exported(model=name, to=to, dtype=dtype_name, bytes=size, **facts)


def _as_ours(config: PreTrainedConfig, to: str) -> CrossLayerConfig | None:
    """Return a config as one of ours; None for a stock model that is to stay stock."""
    if isinstance(config, CrossLayerConfig):
        return config
    return None if to == "hf" else to_config(config)


def _write(
    model: PreTrainedModel,
    config: CrossLayerConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    to: str,
    name: str,
    folder: Path,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Write the model's own files; return a model with its logits, its architecture, and its layers and parameters."""
    if to != "gguf" and tokenizer is not None:
        with quiet_transformers():
            tokenizer.save_pretrained(folder)
    if to == "hf":
        written = stock.stock_model(model)
        stock.write(written, folder)
        layers = written.config.get_text_config().num_hidden_layers
        facts = {"architecture": type(written).__name__, "layers": layers, "parameters": written.num_parameters()}
        return written, facts
    assert config is not None
    facts = {"layers": len(left(config)), "parameters": model.num_parameters()}
    if to == "deci":
        decilm.write(model, config, folder)
        return model, {"architecture": "DeciLMForCausalLM", **facts}
    try:
        from crosslayer.verbs.export import llama_cpp
    except ModuleNotFoundError as error:
        raise ValueError("writing a GGUF file needs a package: pip install 'crosslayer[gguf]'") from error
    llama_cpp.write(model, config, tokenizer, name, folder)
    return model, {"architecture": llama_cpp.architecture(left(config)), **facts}
