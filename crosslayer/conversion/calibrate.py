"""Fit W_c, layer by layer from below, so that a rewired model follows the original on calibration text.

    E = wanted − x'_rewired  (streams after attention),  X = the normed input of the rewired layer,  X W_c ≈ E

"layerwise": wanted is what the original layer makes of the *rewired* model's stream, so that W_c stands for what was
taken from this layer and for nothing else. All others want the original model's own stream, so that W_c also has to
undo what went wrong below: it can do that on text of the same kind only.

"mean": W_c = pinv(X̄) Ē over position-wise means in v groups of sequences (UniAttn, arXiv 2502.00439, Theorem 3.1).
"lstsq": least squares over all tokens. "ridge", "layerwise": with a penalty chosen by leaving one domain out.

Memory: the streams at one layer for all tokens (of both models, but for "layerwise"), and the states that the wiring
lends; never all layers.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crosslayer.conversion.moments import FITS, Fit, Moments, check_enough
from crosslayer.decoder.modeling import CrossLayerDecoderLayer, CrossLayerForCausalLM
from crosslayer.method import Carry, Compensation, check_choice

TOKENS_EACH = 2048  # of one batch
Text = Tensor | Mapping[str, Tensor]  # ids (N, T), or those of each domain by name


@torch.no_grad()
def calibrate(
    original: CrossLayerForCausalLM,
    model: CrossLayerForCausalLM,
    text: Text,
    fit: str = "layerwise",
    groups: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Fit]:
    """Fit and set every W_c of `model`; `original` is the plain model with the same weights.

    `text`: ids (N, T), or those of several domains by name, one of which at a time is left out to choose a penalty.

    Raises:
        ValueError: there is no W_c, or too little text; the message says how many tokens are needed.

    """
    domains = [text] if isinstance(text, Tensor) else list(text.values())
    sizes = [len(ids) for ids in domains]
    _check(model, domains, fit, groups)
    run, made = _Streams(original, model, torch.cat(domains), fit != "layerwise"), []
    compensated = [i for i, layer in enumerate(run.two) if layer.compensation is not None]
    for layer in range(compensated[-1] + 1):
        if layer in compensated:
            made.append(run.fit(layer, fit, Moments(run.theirs[0], sizes, groups)))
        if layer < compensated[-1]:
            run.step(layer)
        if progress is not None:
            progress(layer + 1, compensated[-1] + 1)
    return made


def _check(model: CrossLayerForCausalLM, domains: list[Tensor], fit: str, groups: int) -> None:
    check_choice("calibrate", "fit", fit, FITS)
    if not any(isinstance(module, Compensation) for module in model.modules()):
        raise ValueError("no layer has a W_c to fit; give the method compensation='attention'")
    if any(layer.attn_residual is not None or layer.mlp_residual is not None for layer in _layers(model)):
        names = ", ".join(method.name() for method in model.config.methods)
        raise ValueError(f"{names}: W_c is fitted between plain residual streams; train it instead (fit 'zero')")
    lengths = {ids.shape[1] for ids in domains}
    if len(lengths) != 1:
        raise ValueError(f"calibration text needs sequences of one length; its domains have {sorted(lengths)}")
    sizes = [len(ids) for ids in domains]
    if not 1 <= groups <= sum(sizes):
        raise ValueError(f"groups is {groups}; it must be between 1 and the {sum(sizes)} calibration sequences")
    check_enough(model.config.hidden_size, sizes, lengths.pop(), fit)


class _Streams:
    """Both models at one boundary between layers, for all calibration tokens, a batch at a time.

    Without `both`, the original's layers are asked about the rewired model's stream, and there is no other.
    """

    def __init__(self, original: CrossLayerForCausalLM, model: CrossLayerForCausalLM, ids: Tensor, both: bool):
        self.model, self.both = model.model, both
        self.one, self.two = _layers(original), _layers(model)
        ids = ids.to(model.device)
        self.batches = ids.split(max(1, TOKENS_EACH // ids.shape[1]))
        self.theirs = [original.model.embed_tokens(batch) for batch in self.batches]
        self.ours, self.parted = self.theirs, False  # one list as long as both models compute the same
        self.carries: list[Carry] = [{} for _ in self.batches]
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        self.rotary = self.model.rotary_emb(self.theirs[0], position_ids=position)
        sizes = {len(stream): stream for stream in self.theirs}  # the last batch may be smaller
        self.masks = {size: self.model._masks(stream, None, None, position) for size, stream in sizes.items()}
        kinds = model.config.layer_types
        assert kinds is not None
        self.kinds, self.ahead = kinds, -1  # the last layer that the original has already passed

    def step(self, layer: int) -> None:
        """Take both models through a layer."""
        one, two = self.one[layer], self.two[layer]
        self._part(one, two)
        for number in range(len(self.batches)):
            stream, carry = self._run(two, number, layer, self.ours, self.carries[number])
            self.ours[number].copy_(stream)  # in place: freed and new streams in turns would scatter over the memory
            self.carries[number] = {name: state for name, state in carry.items() if name != "read"}
            if self.parted and self.ahead < layer:
                self.theirs[number].copy_(self._run(one, number, layer, self.theirs, {})[0])

    def fit(self, layer: int, fit: str, sums: Moments) -> Fit:
        """Fit W_c of a layer to what the layer lacks without it."""
        one, two = self.one[layer], self.two[layer]
        self._part(one, two)
        compensation = two.compensation
        assert isinstance(compensation, Compensation)
        compensation.reset()
        for number in range(len(self.batches)):
            asked = self.theirs if self.both else self.ours
            wanted, output = self._seen(one, number, layer, asked, {}, compensation.target)
            found, _ = self._seen(two, number, layer, self.ours, self.carries[number], compensation.target)
            assert found.normed is not None
            sums.add(found.normed, wanted.reached - found.reached, number * len(self.batches[0]))
            if output is not None:
                self.theirs[number].copy_(output)
        self.ahead = layer
        weight, penalty, left_out = sums.solve(fit)
        written = weight.T
        if compensation.target == "heads":
            assert two.self_attn is not None
            projection = two.self_attn.o_proj.weight.double()
            written = torch.linalg.pinv(projection) @ written
            weight = (projection @ written).T  # what W_o lets through
        compensation.weight.copy_(written)
        return sums.report(layer, weight, penalty, left_out)

    def _seen(
        self,
        layer: CrossLayerDecoderLayer,
        number: int,
        index: int,
        streams: list[Tensor],
        carry: Carry,
        target: str,
    ) -> tuple["_Watch", Tensor | None]:
        """Run a layer as far as W_c needs it; return what was seen, and the output where a stream goes on with it."""
        goes_on = streams is not self.ours
        with _Watch(layer, target, stop=not goes_on) as watch, contextlib.suppress(_EnoughError):
            watch.output = self._run(layer, number, index, streams, carry)[0]
        return watch, watch.output if goes_on else None

    def _run(
        self, layer: CrossLayerDecoderLayer, number: int, index: int, streams: list[Tensor], carry: Carry
    ) -> tuple[Tensor, Carry]:
        return layer(streams[number], carry, self.rotary, self.masks[len(streams[number])][self.kinds[index]])

    def _part(self, one: CrossLayerDecoderLayer, two: CrossLayerDecoderLayer) -> None:
        if self.both and not self.parted and not _same(one, two):
            self.parted, self.ours = True, [stream.clone() for stream in self.theirs]


def _layers(model: CrossLayerForCausalLM) -> list[CrossLayerDecoderLayer]:
    return list(model.model.layers)  # type: ignore[arg-type]


def _same(one: CrossLayerDecoderLayer, two: CrossLayerDecoderLayer) -> bool:
    """Return whether two layers have the very same weights and the second borrows nothing."""
    if two.self_attn is None or two.self_attn.borrows or len(two.self_attn.mixers):
        return False
    return _same_weights(one, two)


def _same_weights(one: nn.Module, two: nn.Module) -> bool:
    weights, others = dict(one.named_parameters()), dict(two.named_parameters())
    return set(weights) == set(others) and all(weights[n].data_ptr() == others[n].data_ptr() for n in weights)


def changed_alone(original: CrossLayerForCausalLM, model: CrossLayerForCausalLM) -> list[int]:
    """Return the layers in which something changes that is in no layerwise target, and that only "ridge" sees.

    That is a layer without W_c, such as a leader whose keys and values were merged, or a dropped MLP that W_c does not
    write to. The models share their weights' tensors.
    """
    found = []
    for number, (one, two) in enumerate(zip(_layers(original), _layers(model), strict=True)):
        compensation = two.compensation
        if not isinstance(compensation, Compensation):
            covered = _same(one, two)
        else:
            assert one.mlp is not None
            covered = compensation.target == "mlp" or (two.mlp is not None and _same_weights(one.mlp, two.mlp))
        if not covered:
            found.append(number)
    return found


class _EnoughError(Exception):
    """The stream after attention is there; the MLP need not run."""


class _Watch:
    """Keeps the normed input of a layer and the stream to which W_c writes."""

    def __init__(self, layer: CrossLayerDecoderLayer, target: str, stop: bool = False):
        self.layer, self.stop = layer, stop
        self.early = target != "mlp" and layer.mlp is not None  # else the layer's output is what W_c changes
        self.normed: Tensor | None = None
        self.stream: Tensor | None = None
        self.output: Tensor | None = None
        self.handles: list[Any] = []

    def __enter__(self) -> "_Watch":
        assert self.layer.input_layernorm is not None
        self.handles.append(self.layer.input_layernorm.register_forward_hook(self._keep_normed))
        if self.early and self.layer.post_attention_layernorm is not None:
            self.handles.append(self.layer.post_attention_layernorm.register_forward_pre_hook(self._keep_stream))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def reached(self) -> Tensor:
        """The stream after attention, or the layer's output where W_c acts on that."""
        found = self.stream if self.early else self.output
        assert found is not None
        return found

    def _keep_normed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.normed = output

    def _keep_stream(self, module: nn.Module, args: Any) -> None:
        self.stream = args[0]
        if self.stop:
            raise _EnoughError
