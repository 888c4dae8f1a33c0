"""Fit W_c, layer by layer from below, so that a rewired model follows the original on calibration text.

    E = x'_original − x'_rewired  (streams after attention),  X = the normed input of the rewired layer,  X W_c ≈ E

"mean": W_c = pinv(X̄) Ē over position-wise means in v groups of sequences (UniAttn, arXiv 2502.00439, Theorem 3.1).
"lstsq": least squares over all tokens. "ridge": the same with a penalty chosen on held-out sequences.

Memory: the streams of both models at one layer for all tokens, and the states that the wiring lends; never all layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crosslayer.decoder.modeling import CrossLayerDecoderLayer, CrossLayerForCausalLM
from crosslayer.method import Carry, Compensation, check_choice

FITS = ("zero", "mean", "lstsq", "ridge")
PENALTIES = tuple(10.0**exponent for exponent in range(-7, 3))  # times the mean square of an input
HELD_OUT = 8  # every n-th sequence is held out, to choose the penalty
TOKENS_EACH = 2048  # of one batch
NEEDED = 2  # tokens for each input of W_c, below which least squares memorise


@dataclass(frozen=True)
class Fit:
    """What W_c of one layer does: root mean square of E before, and of E − X W_c after; on all calibration tokens.

    `mean_*` is that of the position-wise mean, which Theorem 3.1 makes small; `penalty` that of ridge.
    """

    layer: int
    token_before: float
    token_after: float
    mean_before: float
    mean_after: float
    penalty: float | None = None


@torch.no_grad()
def calibrate(
    original: CrossLayerForCausalLM,
    model: CrossLayerForCausalLM,
    ids: Tensor,
    fit: str = "ridge",
    groups: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Fit]:
    """Fit and set every W_c of `model`; `original` is the plain model with the same weights, `ids` (N, T) the text.

    Raises:
        ValueError: there is no W_c, or too little text; the message says how many tokens are needed.

    """
    _check(model, ids, fit, groups)
    run, made = _Streams(original, model, ids), []
    compensated = [i for i, layer in enumerate(run.two) if "compensation" in layer._modules]
    for layer in range(compensated[-1] + 1):
        if layer in compensated:
            made.append(run.fit(layer, fit, groups))
        if layer < compensated[-1]:
            run.step(layer)
        if progress is not None:
            progress(layer + 1, compensated[-1] + 1)
    return made


def _check(model: CrossLayerForCausalLM, ids: Tensor, fit: str, groups: int) -> None:
    check_choice("calibrate", "fit", fit, FITS)
    if not any(isinstance(module, Compensation) for module in model.modules()):
        raise ValueError("no layer has a W_c to fit; give the method compensation='attention'")
    if any(residual in layer._modules for layer in _layers(model) for residual in ("attn_residual", "mlp_residual")):
        names = ", ".join(method.name() for method in model.config.methods)
        raise ValueError(f"{names}: W_c is fitted between plain residual streams; train it instead (fit 'zero')")
    if not 1 <= groups <= len(ids):
        raise ValueError(f"groups is {groups}; it must be between 1 and the {len(ids)} calibration sequences")
    held = len(ids) // HELD_OUT if fit == "ridge" else 0
    count, needed = (len(ids) - held) * ids.shape[1], NEEDED * model.config.hidden_size
    if fit in ("lstsq", "ridge") and (count < needed or (fit == "ridge" and not held)):
        least = max(needed + needed // (HELD_OUT - 1), HELD_OUT * ids.shape[1]) if fit == "ridge" else needed
        raise ValueError(
            f"calibration text has {ids.numel()} tokens; {fit} needs at least {least} "
            f"({NEEDED} for each of the {model.config.hidden_size} inputs of W_c)"
        )


class _Streams:
    """Both models at one boundary between layers, for all calibration tokens, a batch at a time."""

    def __init__(self, original: CrossLayerForCausalLM, model: CrossLayerForCausalLM, ids: Tensor):
        self.model = model.model
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

    def fit(self, layer: int, fit: str, groups: int) -> Fit:
        """Fit W_c of a layer to what the layer lacks without it."""
        one, two = self.one[layer], self.two[layer]
        self._part(one, two)
        compensation = two.compensation
        assert isinstance(compensation, Compensation)
        compensation.reset()
        sums = _Sums(self.theirs[0], sum(map(len, self.batches)), groups)
        for number, batch in enumerate(self.batches):
            with _Watch(one, compensation.target) as watch:
                wanted = self._run(one, number, layer, self.theirs, {})[0]
            target = watch.reached(wanted)
            with _Watch(two, compensation.target, stop=True) as watch:
                try:
                    found = self._run(two, number, layer, self.ours, self.carries[number])[0]
                except _EnoughError:
                    found = None
            assert watch.normed is not None
            sums.add(watch.normed, target - watch.reached(found), number * len(self.batches[0]), len(batch))
            self.theirs[number].copy_(wanted)
        self.ahead = layer
        weight, penalty = sums.solve(fit)
        written = weight.T
        if compensation.target == "heads":
            assert two.self_attn is not None
            projection = two.self_attn.o_proj.weight.double()
            written = torch.linalg.pinv(projection) @ written
            weight = (projection @ written).T  # what W_o lets through
        compensation.weight.copy_(written)
        return sums.report(layer, weight, penalty)

    def _run(
        self, layer: CrossLayerDecoderLayer, number: int, index: int, streams: list[Tensor], carry: Carry
    ) -> tuple[Tensor, Carry]:
        return layer(streams[number], carry, self.rotary, self.masks[len(streams[number])][self.kinds[index]])

    def _part(self, one: CrossLayerDecoderLayer, two: CrossLayerDecoderLayer) -> None:
        if not self.parted and not _same(one, two):
            self.parted, self.ours = True, [stream.clone() for stream in self.theirs]


def _layers(model: CrossLayerForCausalLM) -> list[CrossLayerDecoderLayer]:
    return list(model.model.layers)  # type: ignore[arg-type]


def _same(one: CrossLayerDecoderLayer, two: CrossLayerDecoderLayer) -> bool:
    """Return whether two layers have the very same weights and the second borrows nothing."""
    if two.self_attn is None or two.self_attn.borrows or len(two.self_attn.mixers):
        return False
    weights, others = dict(one.named_parameters()), dict(two.named_parameters())
    return set(weights) == set(others) and all(weights[n].data_ptr() == others[n].data_ptr() for n in weights)


class _EnoughError(Exception):
    """The stream after attention is there; the MLP need not run."""


class _Watch:
    """Keeps the normed input of a layer and the stream to which W_c writes."""

    def __init__(self, layer: CrossLayerDecoderLayer, target: str, stop: bool = False):
        self.layer, self.stop = layer, stop
        self.early = target != "mlp" and layer.mlp is not None  # else the layer's output is what W_c changes
        self.normed: Tensor | None = None
        self.stream: Tensor | None = None
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

    def reached(self, output: Tensor | None) -> Tensor:
        """Return the stream after attention, or the layer's output where W_c acts on that."""
        found = self.stream if self.early else output
        assert found is not None
        return found

    def _keep_normed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.normed = output

    def _keep_stream(self, module: nn.Module, args: Any) -> None:
        self.stream = args[0]
        if self.stop:
            raise _EnoughError


class _Sums:
    """Second moments of X and E for fitting and for held-out sequences, and position-wise sums in groups."""

    def __init__(self, like: Tensor, sequences: int, groups: int):
        length, width = like.shape[1:]
        self.sequences, self.groups, self.length = sequences, groups, length
        square = {"dtype": torch.float64, "device": like.device}
        self.gram = torch.zeros(2, width, width, **square)  # XᵀX of [fitted, held out]
        self.cross = torch.zeros(2, width, width, **square)  # XᵀE
        self.energy = torch.zeros(2, **square)  # ‖E‖²
        self.inputs = torch.zeros(groups, length, width, **square)
        self.errors = torch.zeros(groups, length, width, **square)
        self.members = torch.zeros(groups, **square)

    def add(self, x: Tensor, error: Tensor, first: int, count: int) -> None:
        """Add a batch (B, T, C) whose first sequence has the number `first`."""
        x, error = x.double(), error.double()  # least squares invert what float32 products leave of dependent inputs
        for row in range(count):
            number = first + row
            part, group = int(number % HELD_OUT == HELD_OUT - 1), number * self.groups // self.sequences
            self.gram[part] += x[row].T @ x[row]
            self.cross[part] += x[row].T @ error[row]
            self.energy[part] += error[row].square().sum()
            self.inputs[group] += x[row]
            self.errors[group] += error[row]
            self.members[group] += 1

    def means(self) -> tuple[Tensor, Tensor]:
        """Return X̄ and Ē, (v·T, C)."""
        return tuple((s / self.members[:, None, None]).flatten(0, 1) for s in (self.inputs, self.errors))  # type: ignore[return-value]

    def solve(self, fit: str) -> tuple[Tensor, float | None]:
        """Return W (C, C) with X W ≈ E, and the penalty of ridge."""
        if fit == "zero":
            return torch.zeros_like(self.gram[0]), None
        if fit == "mean":
            x, error = self.means()
            return torch.linalg.pinv(x) @ error, None
        everything, cross = _spectrum(self.gram.sum(0)), self.cross.sum(0)
        if fit == "lstsq":
            return _solve(everything, cross, 0.0), None
        fitted, scale = _spectrum(self.gram[0]), self.gram[0].diagonal().mean()
        tried = [(self._error(_solve(fitted, self.cross[0], float(p * scale)), [1]), p) for p in PENALTIES]
        penalty = min(tried)[1]
        return _solve(everything, cross, float(penalty * self.gram.sum(0).diagonal().mean())), penalty

    def _error(self, weight: Tensor, parts: list[int]) -> float:
        """Return ‖E − X W‖² from the moments alone."""
        gram, cross = self.gram[parts].sum(0), self.cross[parts].sum(0)
        return float(self.energy[parts].sum() - 2 * (weight * cross).sum() + (weight * (gram @ weight)).sum())

    def report(self, layer: int, weight: Tensor, penalty: float | None) -> Fit:
        """Return the errors before and after."""
        tokens = self.sequences * self.length
        x, error = self.means()
        after, rest = max(self._error(weight, [0, 1]), 0.0), error - x @ weight
        return Fit(
            layer,
            float((self.energy.sum() / tokens).sqrt()),
            (after / tokens) ** 0.5,
            float((error.square().sum() / len(error)).sqrt()),
            float((rest.square().sum() / len(rest)).sqrt()),
            penalty,
        )


def _spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, with 0 for directions of no weight, and eigenvectors of XᵀX."""
    values, vectors = torch.linalg.eigh(gram)
    return torch.where(values > values[-1] * 1e-13, values, 0), vectors


def _solve(spectrum: tuple[Tensor, Tensor], cross: Tensor, penalty: float) -> Tensor:
    """Return (XᵀX + penalty)⁻¹ XᵀE; directions of no weight are left alone."""
    values, vectors = spectrum
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values + penalty, 1), 0)
    return vectors @ (inverse[:, None] * (vectors.T @ cross))
