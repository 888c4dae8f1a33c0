"""Exports a model to a format that does not need crosslayer, or says why it cannot."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.environment import quiet_transformers
from crosslayer.extras import check_extra
from crosslayer.models.load import load_config, origin, public_name, ready_model
from crosslayer.models.pair import causal_config
from crosslayer.output.card import LIBRARIES, card, split_card, use
from crosslayer.output.folder import check_free, whole_folder
from crosslayer.output.formatting import Shown, ranges
from crosslayer.output.manifest import write_manifest
from crosslayer.output.progress import progress
from crosslayer.output.record import Frozen
from crosslayer.probe.model import unwrapped
from crosslayer.verbs.export.formats import stock_config, stock_model, write_deci
from crosslayer.verbs.export.layers import culprits, remaining_layers, rope, unlike_llama, unsupported
from crosslayer.verbs.retrofit.page import title
from crosslayer.verbs.serve.caches import not_servable

USE = re.compile(r"## Use\n.*?(?=\n## |\Z)", re.DOTALL)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROPES = ("default", "linear", "llama3")  # rope types that are written to GGUF files


class Exported(Shown, Frozen):
    """What was written: model name, format, architecture, layers, parameters and total bytes."""

    model: str
    to: str
    architecture: str
    layers: int
    parameters: int
    dtype: str
    bytes: int

    def sentences(self) -> list[str]:
        """Return a sentence on what was written."""
        size = f"{self.layers} layers, {self.parameters / 1e6:.1f} M parameters, {self.bytes:,} bytes"
        return [f"{self.architecture}: {size}, in {self.dtype}."]

    def headline(self) -> dict[str, Any]:
        """Return all figures."""
        return self.model_dump()


def export(
    model: PreTrainedModel | str | Path,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    to: str,
    dtype: str | torch.dtype | None = None,
    force: bool = False,
) -> Exported:
    """Export a model to a format that does not need crosslayer, with a card and a manifest.

    Layers with neither attention nor MLP are not written, and later layers are renumbered.

    Args:
        model: a retrofit's folder, another local folder, a hub name, or smollm2. In Python also a loaded model.
        out: folder for the model, its card and its manifest.
        tokenizer: in Python, tokenizer of a loaded model.
        to: hf (a stock class of transformers, Llama if possible), deci (vLLM's DeciLM) or gguf (llama.cpp).
        dtype: float32, bfloat16 or float16; default: the dtype of the stored weights.
        force: replace a folder that crosslayer wrote.

    Raises:
        ValueError: the model cannot be exported to this format (the message gives the reason and possible formats) or
            loaded, or the folder cannot be written.
    """
    model = unwrapped(model)
    if to not in REFUSALS:
        raise ValueError(f"`to` must be one of {', '.join(REFUSALS)}, got {to!r}")
    named = not isinstance(model, PreTrainedModel)
    check_free(Path(out), force)
    name, config = public_name(model), causal_config("export", model)
    translated = config if isinstance(config, CrossLayerConfig) else None
    if translated is None and to != "hf":  # a stock model may stay stock
        translated = to_config(config)
    # The config decides, so this stands before any weights are read.
    if translated is not None and (reason := refusal(translated, to)) is not None:
        others = [form for form in REFUSALS if refusal(translated, form) is None]
        advice = f"use `to` {' or '.join(others)}"
        if not others and not_servable(translated) is None:
            advice = "no other format can hold it; vLLM runs it as it is, with crosslayer serve"
        elif not others:
            advice = "no other format can hold it; transformers runs it as it is, with crosslayer installed"
        raise ValueError(f"cannot export to {to}: {reason}; {advice}")

    # Weights keep the dtype in which they are stored, not the one that a run would choose, and stay on the CPU.
    if named and dtype is None:
        dtype = config.dtype or torch.float32
    device = "cpu" if named else None
    loaded, own_tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    dtype_name = str(loaded.dtype).removeprefix("torch.")
    if loaded.dtype not in DTYPES:
        raise ValueError(f"`dtype` must be float32, bfloat16 or float16, got {dtype_name}")
    with whole_folder(Path(out), force) as partial, progress(f"writing {to}", 0):
        written, facts = _write(loaded, translated, own_tokenizer, to, name, partial)
        text = _card(model, loaded, name, to, own_tokenizer is not None)
        (partial / "README.md").write_text(text, encoding="utf-8")
        # The manifest of a DeciLM has the plan of its own layers, so that `verify` can run on it.
        config = load_config(str(partial)) if to == "deci" else None
        write_manifest(partial, written, config)  # with logits on fixed ids, which other programs must reproduce
        size = sum(path.stat().st_size for path in partial.rglob("*"))
    return Exported(model=name, to=to, dtype=dtype_name, bytes=size, **facts)


def _card(model: PreTrainedModel | str | Path, loaded: PreTrainedModel, name: str, to: str, tokenizer: bool) -> str:
    """Return the model's card, or a short one if it has none, with a section on how to use the format `to`."""
    path = None if isinstance(model, PreTrainedModel) else Path(model).expanduser() / "README.md"
    facts, body = split_card(path.read_text(encoding="utf-8-sig") if path is not None and path.is_file() else "")
    methods = title(loaded.config.methods) if isinstance(loaded.config, CrossLayerConfig) else ""
    body = body or f"# {name}\n\n{methods or 'No methods.'}"
    note = f"Written by `crosslayer export --to {to}`: it opens without crosslayer."
    section = f"## Use\n\n{note}\n\n{use(to, tokenizer)}\n"
    body = USE.sub(lambda _: section, body, count=1) if USE.search(body) else f"{body.rstrip()}\n\n{section}"
    loaded_by = {"library_name": LIBRARIES[to], "pipeline_tag": "text-generation"}
    return card({"tags": ["crosslayer"], **origin(model), **facts, **loaded_by}, body)


def _write(
    model: PreTrainedModel,
    config: CrossLayerConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    to: str,
    name: str,
    folder: Path,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Write the model's files; return a model with the same logits, and architecture, layers and parameters."""
    if to != "gguf" and tokenizer is not None:
        with quiet_transformers():
            tokenizer.save_pretrained(folder)
    if to == "hf":
        written = stock_model(model)
        with quiet_transformers():
            written.save_pretrained(folder)
        layers = written.config.get_text_config().num_hidden_layers
        facts = {"architecture": type(written).__name__, "layers": layers, "parameters": written.num_parameters()}
        return written, facts
    assert config is not None
    facts = {"layers": len(remaining_layers(config)), "parameters": model.num_parameters()}
    if to == "deci":
        write_deci(model, config, folder)
        return model, {"architecture": "DeciLMForCausalLM", **facts}
    check_extra("gguf", "`to` gguf", "gguf")
    from crosslayer.verbs.export import llama_cpp

    llama_cpp.write(model, config, tokenizer, name, folder)
    return model, {"architecture": llama_cpp.architecture(remaining_layers(config)), **facts}


def no_stock_class(config: CrossLayerConfig) -> str | None:
    """Return why no stock class can hold the remaining layers of a model, None if one can."""
    partial = [layer.number for layer in remaining_layers(config) if not layer.whole]
    if partial:
        return (
            f"layers {ranges(partial)} lack attention or MLP ({culprits(config, partial)}), which every layer of a "
            "stock class has; to remove whole layers, retrofit with part layer"
        )
    try:
        stock_config(config)
    except ValueError as error:
        return str(error)
    return None


def no_deci(config: CrossLayerConfig) -> str | None:
    """Return why vLLM's DeciLM cannot hold the remaining layers of a model like Llama, None if it can."""
    if config.hidden_size % config.num_attention_heads:
        return (
            f"hidden_size ({config.hidden_size}) is not a multiple of num_attention_heads "
            f"({config.num_attention_heads})"
        )
    layers = remaining_layers(config)
    linear = [layer.number for layer in layers if layer.attention == "compensation"]
    if linear:
        return (
            f"layers {ranges(linear)} have linear compensation (W_c) instead of attention "
            f"({culprits(config, linear)}); a retrofit with compensation none has no W_c"
        )
    if layers[0].attention is None:
        first = layers[0].number
        return f"layer {first} has no attention ({culprits(config, [first])}), but DeciLM's first layer needs it"
    return None


def no_gguf(config: CrossLayerConfig) -> str | None:
    """Return why llama.cpp cannot run the remaining layers of a model like Llama, None if it can."""
    rope_type = rope(config)["rope_type"]
    if rope_type not in ROPES:
        return f"rope_type is {rope_type!r}, and only {', '.join(ROPES)} are supported"
    layers = remaining_layers(config)
    # llama.cpp also removes the attention of a layer without MLP.
    bare = [layer.number for layer in layers if not layer.mlp]
    if bare:
        return f"layers {ranges(bare)} have no MLP ({culprits(config, bare)})"
    # llama.cpp reads the sizes of heads only if the first layer has some.
    if layers[0].attention is None:
        first = layers[0].number
        return f"layer {first} has no attention ({culprits(config, [first])}), but the first layer must have heads"
    return None


REFUSALS: dict[str, Callable[[CrossLayerConfig], str | None]] = {"hf": no_stock_class, "deci": no_deci, "gguf": no_gguf}


def refusal(config: CrossLayerConfig, to: str) -> str | None:
    """Return why a crosslayer model cannot be exported to a format, None if it can."""
    return unsupported(config) or (None if to == "hf" else unlike_llama(config)) or REFUSALS[to](config)
