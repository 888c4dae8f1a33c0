"""A pretrained model with another wiring: weights are kept, dropped, merged or new, and each is listed.

What stays is the very tensor of the source; a copy is the caller's business.

The SVD merge takes rank-one factors (keys: one complex number for each rotary pair) and rank-D factors (values: one
matrix for each head) of a group's stacked projections; a layer's factor goes into its own W_q or W_o, so that nothing
is added.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from crosslayer.decoder.configuration import CrossLayerConfig
from crosslayer.decoder.modeling import CrossLayerForCausalLM
from crosslayer.decoder.weights import FAMILIES, to_config
from crosslayer.method import Method, Mixing, check_choice
from crosslayer.methods import to_entry
from crosslayer.methods.cla import CLA
from crosslayer.methods.drop import Drop

MERGES = ("first", "mean", "svd")


@dataclass(frozen=True)
class Conversion:
    """The rewired model, and what became of the source's weights (names)."""

    model: PreTrainedModel
    dropped: list[str]
    merged: list[str]
    new: list[str]


@torch.no_grad()
def convert(source: PreTrainedModel, methods: list[Method], merge: str = "first") -> Conversion:
    """Rewire a Llama, Mistral, Qwen2 or Qwen3 model; `merge` says which keys and values a CLA group uses.

    "first": the leader's own. "mean": the mean of the group's projections, as seen from the leader's normalised input.
    "svd": the shared projection that fits all of them best. Whole dropped layers alone give the source's own class.

    Raises:
        ValueError: the family or the wiring is not possible, a weight is not finite, or the merge does not apply.

    """
    check_choice("convert", "merge", merge, MERGES)
    broken = [name for name, weight in source.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        raise ValueError(f"{len(broken)} weights hold NaN or infinity, the first is {broken[0]}; they must be finite")
    config = to_config(source.config, [to_entry(method) for method in methods])
    groups = _groups(methods, config)
    if len(methods) == 1 and _only_whole_layers(methods[0]) and merge == "first":
        return _without_layers(source, methods[0])  # type: ignore[arg-type]
    if merge != "first" and not groups:
        raise ValueError(f"merge {merge!r} merges keys and values of CLA groups, and there are none; use first")
    weights = dict(source.state_dict())
    merged = _merge(weights, config, groups, merge) if merge != "first" else []
    model = _empty(config, source)
    names = set(model.state_dict())
    model.load_state_dict({name: weights[name] for name in names if name in weights}, strict=False, assign=True)
    model.tie_weights()
    for module in model.modules():
        if isinstance(module, Mixing) and any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=source.device, recurse=False).to(source.dtype)
            module.reset()
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lost:
        raise ValueError(f"{type(source).__name__} has no weight {lost[0]}; unload adapters before a retrofit")
    model.generation_config = copy.deepcopy(source.generation_config)
    return Conversion(
        model.eval(),
        dropped=sorted(set(weights) - names),
        merged=[name for name in merged if name in names],
        new=sorted(names - set(weights)),
    )


def _empty(config: CrossLayerConfig, source: PreTrainedModel) -> CrossLayerForCausalLM:
    """Build the model without memory; only the rotary tables, which no checkpoint holds, are real."""
    with torch.device("meta"):
        model: Any = CrossLayerForCausalLM._from_config(
            config, dtype=source.dtype, attn_implementation=source.config._attn_implementation
        )
    model.model.rotary_emb = LlamaRotaryEmbedding(config=config).to(source.device)
    return model


def _groups(methods: list[Method], config: CrossLayerConfig) -> list[list[int]]:
    """Return the groups of CLA that have followers, without the layers that another method drops."""
    layers, found = range(config.num_hidden_layers), []
    for method in methods:
        source = method.plan(len(layers)).keys if isinstance(method, CLA) else ()
        for leader in dict.fromkeys(source):
            found.append([i for i in layers if source[i] == leader and config.plan.attends(i)])
    return [group for group in found if len(group) > 1]


def _only_whole_layers(method: Method) -> bool:
    return isinstance(method, Drop) and bool(method.layers) and not method.attention and not method.mlp


def _without_layers(source: PreTrainedModel, method: Drop) -> Conversion:
    """Return a model of the source's own class with fewer layers."""
    if source.config.model_type not in FAMILIES:
        to_config(source.config)  # says which families can be converted
    layers = source.config.num_hidden_layers
    method.plan(layers)
    kept = [i for i in range(layers) if i not in method.layers]
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = len(kept)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[i] for i in kept]
    with torch.device("meta"):
        model: Any = type(source)._from_config(
            config, dtype=source.dtype, attn_implementation=source.config._attn_implementation
        )
    model.model.rotary_emb = type(source.model.rotary_emb)(config=config).to(source.device)
    place = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(kept)}
    weights, dropped = {}, []
    for name, weight in source.state_dict().items():
        if not name.startswith("model.layers."):
            weights[name] = weight
        elif (prefix := ".".join(name.split(".")[:3]) + ".") in place:
            weights[name.replace(prefix, place[prefix], 1)] = weight
        else:
            dropped.append(name)
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return Conversion(model.eval(), sorted(dropped), [], [])


def _merge(weights: dict[str, Tensor], config: CrossLayerConfig, groups: list[list[int]], merge: str) -> list[str]:
    """Change the weights of each group in place of the source's; return the names of those that changed."""
    assert config.head_dim is not None
    if merge == "svd" and config.head_dim > config.hidden_size:
        raise ValueError(
            f"merge 'svd' needs heads (size {config.head_dim}) within {config.hidden_size}; use first or mean"
        )
    if config.qk_norm and merge == "svd":
        raise ValueError(
            "merge 'svd' folds factors of the keys into W_q, which a qk-norm would undo; use first or mean"
        )
    changed = []
    for group in groups:
        for state in "kv":
            stacked = torch.stack([_seen(weights, layer, state) for layer in group])  # (G, H_kv·D, C [+1])
            if merge == "mean":
                shared = stacked.mean(dim=0)
            else:
                shared, factors = (_svd_keys if state == "k" else _svd_values)(stacked, config)
                changed += _fold(weights, config, group, state, factors)
            changed += _write(weights, group[0], state, shared)
    return changed


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _seen(weights: dict[str, Tensor], layer: int, state: str) -> Tensor:
    """Return a projection with its norm's gain and, as the last column, its bias, in float64."""
    gain = weights[_prefix(layer) + "input_layernorm.weight"].double()
    matrix = weights[f"{_prefix(layer)}self_attn.{state}_proj.weight"].double() * gain
    bias = weights.get(f"{_prefix(layer)}self_attn.{state}_proj.bias")
    return matrix if bias is None else torch.cat([matrix, bias.double()[:, None]], dim=1)


def _write(weights: dict[str, Tensor], leader: int, state: str, shared: Tensor) -> list[str]:
    gain = weights[_prefix(leader) + "input_layernorm.weight"].double()
    name = f"{_prefix(leader)}self_attn.{state}_proj."
    matrix = shared[:, : len(gain)] / torch.where(gain == 0, torch.ones_like(gain), gain)
    weights[name + "weight"] = matrix.to(weights[name + "weight"].dtype)
    if shared.shape[1] == len(gain):
        return [name + "weight"]
    weights[name + "bias"] = shared[:, -1].to(weights[name + "bias"].dtype)
    return [name + "weight", name + "bias"]


def _svd_keys(stacked: Tensor, config: CrossLayerConfig) -> tuple[Tensor, Tensor]:
    """Return shared keys and, for each layer, head and rotary pair, the complex factor: k_l ≈ factor · k.

    A rotation of the pair (i, i + D/2) commutes with a complex number and with nothing else.
    """
    group, rows, width = stacked.shape
    assert config.head_dim is not None
    split = stacked.view(group, rows // config.head_dim, 2, config.head_dim // 2, width)
    paired = torch.complex(split[:, :, 0], split[:, :, 1]).permute(1, 2, 0, 3)  # (H_kv, D/2, G, C)
    left, values, right = torch.linalg.svd(paired, full_matrices=False)
    size = values[..., 0] / group**0.5  # so that the factors of equal layers are 1 in size
    shared = size[..., None] * right[..., 0, :]
    factors = left[..., 0] * group**0.5  # (H_kv, D/2, G)
    turned = factors[..., :1] / factors[..., :1].abs().clamp(min=1e-30)  # the leader's factor becomes real
    shared, factors = shared * turned, factors / turned
    parts = torch.stack([shared.real, shared.imag], dim=1).reshape(rows, width)
    return parts, factors.permute(2, 0, 1)


def _svd_values(stacked: Tensor, config: CrossLayerConfig) -> tuple[Tensor, Tensor]:
    """Return shared values and, for each layer and head, the matrix R with v_l ≈ R v."""
    group, rows, width = stacked.shape
    assert config.head_dim is not None
    heads = rows // config.head_dim
    tall = stacked.view(group, heads, config.head_dim, width).transpose(0, 1).reshape(heads, -1, width)
    left, values, right = torch.linalg.svd(tall, full_matrices=False)
    rank = config.head_dim
    shared = right[:, :rank].reshape(rows, width) * group**-0.5
    factors = (left[..., :rank] * values[:, None, :rank]).view(heads, group, rank, rank).transpose(0, 1) * group**0.5
    return shared, factors


def _fold(
    weights: dict[str, Tensor], config: CrossLayerConfig, group: list[int], state: str, factors: Tensor
) -> list[str]:
    """Put each layer's factors into its queries (of keys) or its output projection (of values)."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    repeat, size, changed = config.num_attention_heads // config.num_key_value_heads, config.head_dim, []
    for layer, factor in zip(group, factors.repeat_interleave(repeat, dim=1), strict=True):  # (H, …)
        name = f"{_prefix(layer)}self_attn.{'q' if state == 'k' else 'o'}_proj.weight"
        old = weights[name]
        if state == "v":
            matrix = old.double().view(old.shape[0], -1, size)  # (C, H, D)
            weights[name] = torch.einsum("chd,hde->che", matrix, factor).reshape(old.shape).to(old.dtype)
            changed.append(name)
            continue
        for part in (name, name.replace("weight", "bias")):
            if part in weights:
                weights[part] = _turned(weights[part], factor, size)
                changed.append(part)
    return changed


def _turned(rows: Tensor, factor: Tensor, size: int) -> Tensor:
    """Multiply the rotary pairs of queries by the conjugate factors, so that q · (factor k) = (conj(factor) q) · k."""
    split = rows.double().view(-1, 2, size // 2, *rows.shape[1:])
    paired = torch.complex(split[:, 0], split[:, 1])
    paired = paired * factor.conj().view(*factor.shape, *([1] * (rows.dim() - 1)))
    return torch.stack([paired.real, paired.imag], dim=1).reshape(rows.shape).to(rows.dtype)
