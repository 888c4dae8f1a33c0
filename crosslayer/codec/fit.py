"""Fits a codec to a model, by forward passes over calibration text alone.

Layer by layer, each predicted from the layers below as they are decoded: A by weighted least squares; the principal
components E of the rest in the metric M of `metric`, those of at least 6% of the energy of a step; D = M E / step,
U = step · Eᵀ M⁻¹; then a class and a shift for each channel. The first token of each window is left out: it is stored
as it is.

The metric counts an error relative to the stream that it is added to, which leaves out what later layers make of it:
in Gemma 3 270M, two of 18 layers then had three quarters of the damage. So each layer's metric is scaled to the KL that
errors of that layer alone cost in the end (`weighed`). KLs of single layers add up.

Shapes: N calibration tokens, W numbers of a layer for each token, R channels of a layer, T tokens, L layers.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.cache.running import prefill
from crosslayer.codec.chain import (
    Chain,
    Importance,
    Layer,
    below_of,
    code_layers,
    features,
    predicted,
    sources,
    step_sizes,
)
from crosslayer.codec.entropy import fitted, quantized
from crosslayer.codec.judge import continued
from crosslayer.codec.metric import Metric
from crosslayer.codec.states import HALF, CodedLayer, new_cache, read_states, turned
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.model import evaluating

PART = 4  # the last quarter of a window reads the tokens before it
RIDGE = 0.01  # of the metric, in units of its mean eigenvalue
LEAST = 1e-4  # ridge of predictions, in units of their mean variance
KEPT = 0.06  # energy of a channel that is kept, in units of a step squared
USED = 2e-4  # share of tokens in which a channel that is kept has a code other than 0
SHRUNK = 0.1  # ridge of the regression of costs
WEIGHT = 32.0  # at most, of a token
BASIS = 0.125  # share of the 16-bit cache at which matrices are fitted; larger ones at themselves
QUICK = 4  # every 4th token is enough to find a step
TRIES, ROUGH, CLOSE = 6, 0.15, 0.005
SLOPE = 1.2  # of the logarithm of the step over that of the bytes
WINDOWS = 6  # of calibration text, on which the costs of layers are measured
FACTOR_POWER = 0.75  # of KL over squared error in a metric's factor; below 1, as six windows leave it uncertain


@dataclass
class Calibration:
    """What forward passes over calibration windows gave.

    Attributes:
        states: of each layer, (N, W), windows one after the other, without their first tokens.
        steps: of the tokens, (N,).
        metric: (W, W) of each layer.
        importance: of tokens.
        held_out: states and steps of windows that nothing is fitted to, for the number of bytes.
    """

    shapes: list[CodedLayer]
    states: list[Tensor]
    steps: Tensor
    metric: list[Tensor]
    importance: Importance
    held_out: tuple[list[Tensor], Tensor]
    roots: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self):
        self.roots = [_roots(metric.to(self.steps.device)) for metric in self.metric]


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, shapes: list[CodedLayer], ids: Tensor, held_out: Tensor, seed: int = 0
) -> Calibration:
    """Run the model over windows (N, T): of each the states, and how two continuations of its prefix read them."""
    generator = torch.Generator().manual_seed(seed)
    metric, windows, costs = Metric(model, shapes), [], []
    continued = ids.shape[1] // PART
    prefix = ids.shape[1] - continued
    with evaluating(model), progress("reading calibration text", len(ids) + len(held_out)) as bar:
        for done, row in enumerate(ids.to(model.device), 1):
            states = _states(model, row, shapes)
            before = [own[:prefix] for own in states]
            cache = new_cache([before], shapes, [0], prefix, model.dtype)
            start = int(torch.randint(1, prefix - continued, (), generator=generator))
            cost = metric.read(cache, row[None, start : start + continued])  # a repeat from the prefix
            costs.append((before, cost + metric.read(cache, row[None, prefix:])))
            windows.append(states)
            bar.step(done, len(ids) + len(held_out))
        others = []
        for done, row in enumerate(held_out.to(model.device), len(ids) + 1):
            others.append(_states(model, row, shapes))
            bar.step(done, len(ids) + len(held_out))
    importance = _importance(costs, shapes)
    states, steps = _stacked(windows, importance, shapes)
    return Calibration(shapes, states, steps, metric.by_layer, importance, _stacked(others, importance, shapes))


def tokens_needed(shapes: Sequence[CodedLayer]) -> int:
    """Return how many tokens a fit needs: more than the numbers that predict a layer, among every `QUICK`-th token.

    Of a model whose layers keep W numbers for a token, 8 W: a layer is predicted from two.
    """
    return QUICK * max(sum(shapes[source].width for source in below) for below in sources(shapes)) + QUICK


def _states(model: PreTrainedModel, ids: Tensor, shapes: list[CodedLayer]) -> list[Tensor]:
    """Return the states (T, W) of all tokens (T,), whatever a window would still hold."""
    found: dict[int, Tensor] = {}

    def see(call: AttentionCall) -> None:
        keys = turned(call.key[0].transpose(0, 1), 0, shapes[call.layer], back=True)
        found[call.layer] = torch.cat([keys.flatten(1), call.value[0].transpose(0, 1).flatten(1).float()], 1)

    with visited(model, see):
        model(ids[None], use_cache=False, logits_to_keep=1)
    return [found[layer] for layer in range(len(shapes))]


def _stacked(
    windows: list[list[Tensor]], importance: Importance, shapes: list[CodedLayer]
) -> tuple[list[Tensor], Tensor]:
    steps = torch.cat([step_sizes(importance.steps(window, shapes, len(window[0])))[1:] for window in windows])
    return [torch.cat([window[layer][1:] for window in windows]) for layer in range(len(shapes))], steps


def _importance(costs: list[tuple[list[Tensor], Tensor]], shapes: list[CodedLayer]) -> Importance:
    """Fit the regression of log cost on the features of a token, by ridge."""
    rows = torch.cat([features(states, shapes, len(cost))[1:] for states, cost in costs]).double()
    target = torch.cat([cost[1:] for _, cost in costs]).double().clamp_min(1e-20).log()
    mean, spread = rows.mean(0), rows.std(0) + 1e-6
    rows = (rows - mean) / spread
    gram = rows.T @ rows + SHRUNK * len(rows) * torch.eye(rows.shape[1]).to(rows)
    weight = torch.linalg.solve(gram, rows.T @ (target - target.mean()))
    return Importance(mean.float(), spread.float(), weight.float())


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root of a metric and its inverse."""
    if not metric.diagonal().mean() > 0:
        raise ValueError("a codec cannot be fitted: in some layer, keys and values have no effect on the output")
    ridge = RIDGE * metric.diagonal().mean() * torch.eye(len(metric)).to(metric)
    values, vectors = torch.linalg.eigh(metric + ridge)
    root = values.clamp_min(1e-30).sqrt()
    return ((vectors * root) @ vectors.T).float(), ((vectors / root) @ vectors.T).float()


def fit_chain(calibration: Calibration, step: float, every: int = 1) -> Chain:
    """Fit the chain for a step, on one in `every` tokens."""
    steps = calibration.steps[::every]
    weight = steps.square().reciprocal().clamp_max(WEIGHT)[:, None]
    layers: list[Layer] = []
    decoded: list[Tensor] = []
    for index, own_sources in enumerate(sources(calibration.shapes)):
        own = calibration.states[index][::every]
        below = below_of(own_sources, decoded, len(own))
        assert len(own) > sum(states.shape[1] for states in below), "fit_codec checks tokens_needed first"
        predict, offset = _regression(below, own, weight)
        prediction = predicted(below, predict, offset)
        rest = own - prediction
        root, inverse = calibration.roots[index]
        seen = rest @ root
        energy, vectors = torch.linalg.eigh(((seen * weight).T @ seen / weight.sum()).double())
        count = max(8, int((energy > KEPT * step**2).sum()))
        basis = vectors.flip(1)[:, :count].float()
        down, up = root @ basis / step, step * (inverse @ basis).T
        z = rest @ down / steps[:, None]
        used = (quantized(z) != 0).float().mean(0) > USED
        used[:8] = True
        matrices = offset, predict, down[:, used], up[used]
        layer = _layer(calibration.shapes[index], own_sources, matrices, z[:, used])
        layers.append(layer)
        decoded.append(layer.decoded(prediction, layer.coded(prediction, own, steps), steps))
    return Chain(layers, calibration.importance)


def with_step(chain: Chain, calibration: Calibration, factor: float) -> Chain:
    """Return a chain whose step is `factor` times as large: only the classes of the channels are fitted again."""
    layers: list[Layer] = []
    decoded: list[Tensor] = []
    for index, layer in enumerate(chain.layers):
        below = below_of(layer.sources, decoded, len(calibration.steps))
        prediction = predicted(below, layer.predict, layer.offset)
        z = (calibration.states[index] - prediction) @ layer.down / factor / calibration.steps[:, None]
        used = (quantized(z) != 0).float().mean(0) > USED
        used[:1] = True
        matrices = layer.offset, layer.predict, layer.down[:, used] / factor, layer.up[used] * factor
        layers.append(_layer(layer.shape, layer.sources, matrices, z[:, used]))
        codes = layers[-1].coded(prediction, calibration.states[index], calibration.steps)
        decoded.append(layers[-1].decoded(prediction, codes, calibration.steps))
    return Chain(layers, chain.importance)


def _layer(shape: CodedLayer, below: tuple[int, ...], matrices: Sequence[Tensor], z: Tensor) -> Layer:
    """Return a layer whose channels are in the order of their classes, its matrices rounded as they are stored."""
    offset, predict, down, up = matrices
    coarser = (HALF / down.abs().amax(0)).clamp_max(1)  # (C,): a step that 16-bit matrices can hold
    z, down, up = z * coarser, down * coarser, up / coarser[:, None]
    classes, shift = fitted(z)
    order = classes.argsort(stable=True)
    stored = [matrix.half().float() for matrix in (predict, down[:, order], up[order], shift[order])]
    if not all(matrix.isfinite().all() for matrix in stored):
        raise ValueError("the step is too fine for 16-bit matrices; ask for fewer bytes")
    predict, down, up, shift = stored
    return Layer(shape, below, offset, predict, down, up, shift, classes[order].cpu())


def _regression(below: Sequence[Tensor], outputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix (W', W), rounded as it is stored, and the offset (W,), by weighted least squares.

    They predict outputs (N, W) from the states (N, W' together) of the layers below.
    """
    mean = (weight * outputs).sum(0) / weight.sum()
    if not below:
        return outputs.new_empty(0, outputs.shape[1]), mean
    inputs = torch.cat(list(below), 1)
    center = (weight * inputs).sum(0) / weight.sum()
    inputs = inputs - center
    gram = ((inputs * weight).T @ inputs).double()
    ridge = LEAST * gram.diagonal().mean() + 1e-9
    gram += ridge * torch.eye(len(gram)).to(gram)
    matrix = torch.linalg.solve(gram, ((inputs * weight).T @ (outputs - mean)).double()).half()
    return matrix.float(), (mean.double() - center.double() @ matrix.double()).float()


def fit_chain_at(calibration: Calibration, bytes_per_token: float) -> Chain:
    """Fit a chain whose codes of held-out text take about `bytes_per_token`; `with_rate` then meets it more closely.

    The step is found on every `QUICK`-th token. A fit for a fine step also serves coarser ones.
    """
    _, step = quick_fit(calibration, bytes_per_token)
    with progress("fitting the codec", 0):
        return fit_chain(calibration, step)


def quick_fit(calibration: Calibration, bytes_per_token: float) -> tuple[Chain, float]:
    """Return a chain that is fitted to every `QUICK`-th token, and a step nearer to `bytes_per_token` than its own."""
    with progress("fitting to a part", 0):
        step = _first_step(calibration)
        chain = fit_chain(calibration, step, QUICK)
        for _ in range(TRIES):
            ratio = chain.bytes_per_token(*calibration.held_out) / bytes_per_token
            step *= min(4.0, max(0.25, ratio**SLOPE))
            if abs(ratio - 1) < ROUGH:
                break
            chain = fit_chain(calibration, step, QUICK)
    return chain, step


def with_rate(chain: Chain, calibration: Calibration, bytes_per_token: float) -> Chain:
    """Return the chain with a step at which held-out text takes `bytes_per_token`, to 0.5%, in at most six tries.

    Raises:
        ValueError: `bytes_per_token` is not above 0.
    """
    if bytes_per_token <= 0:
        raise ValueError("`share` must be larger: headers and the exact first token alone take that many bytes")
    with progress("choosing the step", 0):
        for _ in range(TRIES):
            ratio = chain.bytes_per_token(*calibration.held_out) / bytes_per_token
            if abs(ratio - 1) < CLOSE:
                break
            chain = with_step(chain, calibration, min(4.0, max(0.25, ratio**SLOPE)))
    return chain


def _first_step(calibration: Calibration) -> float:
    """Return a step to begin with: a channel of average energy has codes of about ±4."""
    energies = [
        float((states - states.mean(0)).matmul(root).square().mean())
        for states, (root, _) in zip(calibration.states, calibration.roots, strict=True)
    ]
    return math.sqrt(sum(energies) / len(energies)) / 4


def weighed(calibration: Calibration, model: PreTrainedModel, ids: Tensor, bytes_per_token: float) -> Calibration:
    """Return a calibration whose metrics say what errors cost in KL, from windows (N, T) of calibration text.

    `bytes_per_token` are those of the codes whose errors are measured.
    """
    chain, _ = quick_fit(calibration, bytes_per_token)
    few = ids[:: max(1, len(ids) // WINDOWS)][:WINDOWS]
    factors = layer_costs(model, calibration, chain, few).clamp_min(1e-12).log() * FACTOR_POWER
    factors = (factors - factors.mean()).exp().tolist()
    metric = [own * factor for own, factor in zip(calibration.metric, factors, strict=True)]
    return replace(calibration, metric=metric)


@torch.no_grad()
def layer_costs(model: PreTrainedModel, calibration: Calibration, chain: Chain, ids: Tensor) -> Tensor:
    """Return of each layer the KL that its errors cost over these errors in the calibration's metric, (L,)."""
    shapes, count = calibration.shapes, ids.shape[1] // PART
    found = torch.zeros(2, len(shapes), dtype=torch.float64)
    with evaluating(model), progress("measuring what layers cost", len(ids)) as bar:
        for done, row in enumerate(ids.to(model.device), 1):
            before, after = row[None, :-count], row[None, -count:]
            cache = prefill(model, before)
            states = read_states(cache, 0, 0, before.shape[1], shapes)
            steps = step_sizes(chain.importance.steps(states, shapes, before.shape[1]))
            _, stored = code_layers(chain.layers, states, steps)
            for own, back in zip(states, stored, strict=True):
                if len(own) == len(steps):  # it holds the first token, which is stored as it is
                    back[0] = own[0]
            decoded = new_cache([stored], shapes, [0], before.shape[1], model.dtype)
            exact = continued(model, deepcopy(cache), after)
            for layer, (root, _) in enumerate(calibration.roots):
                mixed = deepcopy(cache)
                mixed.layers[layer] = decoded.layers[layer]  # the model adds to it, and it is not used again
                other = continued(model, mixed, after)
                error = (states[layer] - stored[layer]) @ root / steps[len(steps) - len(stored[layer]) :, None]
                found[0, layer] += float((exact.exp() * (exact - other)).sum(-1).mean())
                found[1, layer] += float(error.square().sum(1).mean())
            bar.step(done, len(ids))
    return found[0] / found[1].clamp_min(1e-30)
