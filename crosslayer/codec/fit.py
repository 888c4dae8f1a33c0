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
from crosslayer.codec.metric import Metric
from crosslayer.codec.quality import continued
from crosslayer.codec.states import HALF, CodedLayer, new_cache, read_states, turned
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.model import evaluating

PART = 4  # the last quarter of a window reads the tokens before it
# Ridge of the metric, in units of its mean eigenvalue. Directions that no query read cost nothing in the calibration
# text; without a ridge, the inverse root of the metric would blow up what is decoded there.
RIDGE = 0.01
# Ridge of predictions, in units of their mean variance. Ten times as much makes no difference beyond noise (SmolLM2).
LEAST = 1e-4
# Energy of a channel that is kept, in units of a step squared. At this energy a channel's spread is a quarter of a
# step, and a code leaves 0 only beyond 0.6 of a step (`entropy.ZONE`): nearly all its codes would be 0.
KEPT = 0.06
# Share of tokens in which a channel that is kept has a code other than 0: five of the default's 48 windows of 512
# tokens. A channel takes 2 W numbers of 16 bits in the codec's matrices.
USED = 2e-4
# Channels that every layer keeps: a layer that is predicted almost exactly would otherwise have none.
FEWEST = 8
# Ridge of the regression of costs, in units of a feature's variance. The norms of a token's heads and layers go
# together, so that the text alone does not say which of them counts.
SHRUNK = 0.1
# Of a token at most. With steps down to 1/64, a weight of 1 / step² reaches 4,096: a few tokens would decide the fit.
WEIGHT = 32.0
# Share of the 16-bit cache at which matrices are fitted; larger shares at themselves. A fit at an eighth also serves
# a sixteenth and less: only the classes of the channels are fitted again.
BASIS = 0.125
QUICK = 4  # every 4th token is enough to find a step
# ROUGH ends the search on a part of the tokens, CLOSE that on all of them: relative distance from the bytes wanted.
TRIES, ROUGH, CLOSE = 6, 0.15, 0.005
# Of the logarithm of the step over that of the bytes. On SmolLM2 it is 2.0 at an eighth and 1.4 at a sixteenth (a
# step × 0.9 takes × 1.054 and × 1.080 bytes); a smaller one comes closer from one side, without going too far.
SLOPE = 1.2
MOST_CHANGE = 4.0  # of the step in one try: far from the bytes wanted, the slope is another
WINDOWS = 6  # of calibration text, on which the costs of layers are measured
# Of KL over squared error in a metric's factor; below 1, as six windows leave it uncertain. On 12 windows of Gemma 3
# 270M, 0.5 and 1 have 0.34 and 0.30 times the KL without factors at an eighth, 0.71 and 0.77 at a sixteenth.
FACTOR_POWER = 0.75


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
        """Compute the root of each layer's metric and its inverse."""
        self.roots = []
        for metric in self.metric:
            metric = metric.to(self.steps.device)
            if not metric.diagonal().mean() > 0:
                raise ValueError(
                    "a codec cannot be fitted: in some layer, keys and values have no effect on the output"
                )
            ridge = RIDGE * metric.diagonal().mean() * torch.eye(len(metric)).to(metric)
            values, vectors = torch.linalg.eigh(metric + ridge)
            root = values.clamp_min(1e-30).sqrt()
            self.roots.append((((vectors * root) @ vectors.T).float(), ((vectors / root) @ vectors.T).float()))


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, shapes: list[CodedLayer], ids: Tensor, held_out: Tensor, seed: int = 0
) -> Calibration:
    """Run the model over windows (N, T): of each the states, and how two continuations of its prefix read them."""
    generator = torch.Generator().manual_seed(seed)
    metric = Metric(model, shapes)
    length = ids.shape[1] // PART  # of a continuation
    prefix = ids.shape[1] - length
    windows, held_out_windows, costs = [], [], []
    with evaluating(model), progress("reading calibration text", len(ids) + len(held_out)) as bar:
        for done, window in enumerate(ids.to(model.device), 1):
            states = _states(model, window, shapes)
            before = [layer_states[:prefix] for layer_states in states]
            # one pass reads the whole window, so the cache of its prefix is made of states
            cache = new_cache([before], shapes, [0], prefix, model.dtype)
            # two readers: a passage of the prefix again, from anywhere in it, and the text that follows
            start = int(torch.randint(1, prefix - length, (), generator=generator))
            cost = metric.read(cache, window[None, start : start + length])
            costs.append((before, cost + metric.read(cache, window[None, prefix:])))
            windows.append(states)
            bar.step(done, len(ids) + len(held_out))
        for done, window in enumerate(held_out.to(model.device), len(ids) + 1):
            held_out_windows.append(_states(model, window, shapes))
            bar.step(done, len(ids) + len(held_out))
    importance = _importance(costs, shapes)
    stacked = []
    for part in (windows, held_out_windows):
        # the first token of a window is stored as it is, so that nothing is fitted to it
        steps = torch.cat([step_sizes(importance.steps(states, shapes, len(states[0])))[1:] for states in part])
        stacked.append(([torch.cat([states[layer][1:] for states in part]) for layer in range(len(shapes))], steps))
    (all_states, all_steps), held_out_part = stacked
    return Calibration(shapes, all_states, all_steps, metric.by_layer, importance, held_out_part)


def tokens_needed(shapes: Sequence[CodedLayer]) -> int:
    """Return how many tokens a fit needs: more than the numbers that predict a layer, among every `QUICK`-th token.

    Of a model whose layers keep W numbers for a token, 8 W: a layer is predicted from two.
    """
    return QUICK * max(sum(shapes[source].width for source in below) for below in sources(shapes)) + QUICK


def _states(model: PreTrainedModel, ids: Tensor, shapes: list[CodedLayer]) -> list[Tensor]:
    """Return the states (T, W) of all tokens (T,), whatever a window would still hold."""
    by_layer: dict[int, Tensor] = {}

    def see(call: AttentionCall) -> None:
        keys = turned(call.key[0].transpose(0, 1), 0, shapes[call.layer], back=True)
        by_layer[call.layer] = torch.cat([keys.flatten(1), call.value[0].transpose(0, 1).flatten(1).float()], 1)

    with visited(model, see):
        model(ids[None], use_cache=False, logits_to_keep=1)
    return [by_layer[layer] for layer in range(len(shapes))]


def _importance(costs: list[tuple[list[Tensor], Tensor]], shapes: list[CodedLayer]) -> Importance:
    """Fit the regression of log cost on the features of a token, by ridge."""
    inputs = torch.cat([features(states, shapes, len(cost))[1:] for states, cost in costs]).double()
    # the logarithm, as costs of tokens differ by orders of magnitude; a token that nobody read has none
    target = torch.cat([cost[1:] for _, cost in costs]).double().clamp_min(1e-20).log()
    mean, spread = inputs.mean(0), inputs.std(0) + 1e-6
    inputs = (inputs - mean) / spread
    gram = inputs.T @ inputs + SHRUNK * len(inputs) * torch.eye(inputs.shape[1]).to(inputs)
    weight = torch.linalg.solve(gram, inputs.T @ (target - target.mean()))
    return Importance(mean.float(), spread.float(), weight.float())


def fit_chain(calibration: Calibration, step: float, every: int = 1) -> Chain:
    """Fit the chain for a step, on one in `every` tokens."""
    steps = calibration.steps[::every]
    weight = steps.square().reciprocal().clamp_max(WEIGHT)[:, None]
    layers: list[Layer] = []
    decoded: list[Tensor] = []
    for index, below in enumerate(sources(calibration.shapes)):
        # what the decoded layers below tell: decoded, as a reader has no others
        states = calibration.states[index][::every]
        inputs = below_of(below, decoded, len(states))
        assert len(states) > sum(part.shape[1] for part in inputs), "fit_codec checks tokens_needed first"
        predict, offset = _regression(inputs, states, weight)
        prediction = predicted(inputs, predict, offset)
        rest = states - prediction

        # principal components of the rest, where an error in any direction costs the same
        root, inverse = calibration.roots[index]
        seen = rest @ root
        energy, vectors = torch.linalg.eigh(((seen * weight).T @ seen / weight.sum()).double())
        count = max(FEWEST, int((energy > KEPT * step**2).sum()))
        basis = vectors.flip(1)[:, :count].float()  # eigh has the least energy first
        down = root @ basis / step
        up = step * (inverse @ basis).T

        # a few outliers give a component energy, and yet hardly a code
        coefficients = rest @ down / steps[:, None]
        used = (quantized(coefficients) != 0).float().mean(0) > USED
        used[:FEWEST] = True
        matrices = offset, predict, down[:, used], up[used]
        layer = _layer(calibration.shapes[index], below, matrices, coefficients[:, used])
        layers.append(layer)
        decoded.append(layer.decoded(prediction, layer.coded(prediction, states, steps), steps))
    return Chain(layers, calibration.importance)


def with_step(chain: Chain, calibration: Calibration, factor: float) -> Chain:
    """Return a chain whose step is `factor` times as large: only the classes of the channels are fitted again."""
    layers: list[Layer] = []
    decoded: list[Tensor] = []
    for index, layer in enumerate(chain.layers):
        inputs = below_of(layer.sources, decoded, len(calibration.steps))
        prediction = predicted(inputs, layer.predict, layer.offset)
        rest = calibration.states[index] - prediction
        coefficients = rest @ layer.down / factor / calibration.steps[:, None]
        used = (quantized(coefficients) != 0).float().mean(0) > USED
        used[:1] = True  # matrices without a channel would be empty
        matrices = layer.offset, layer.predict, layer.down[:, used] / factor, layer.up[used] * factor
        layers.append(_layer(layer.shape, layer.sources, matrices, coefficients[:, used]))
        codes = layers[-1].coded(prediction, calibration.states[index], calibration.steps)
        decoded.append(layers[-1].decoded(prediction, codes, calibration.steps))
    return Chain(layers, chain.importance)


def _layer(shape: CodedLayer, below: tuple[int, ...], matrices: Sequence[Tensor], coefficients: Tensor) -> Layer:
    """Return a layer whose channels are in the order of their classes, its matrices rounded as they are stored."""
    offset, predict, down, up = matrices
    # states as small as those of a tiny model need numbers above float16's largest: their step is made coarser
    coarser = (HALF / down.abs().amax(0)).clamp_max(1)  # (R,)
    down = down * coarser
    up = up / coarser[:, None]
    classes, shift = fitted(coefficients * coarser)
    order = classes.argsort(stable=True)
    # rounded here, so that the layers above are fitted to what a reader of the file decodes
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
        # the first step: a channel of average energy has codes of about ±4
        energies = [
            float((states - states.mean(0)).matmul(root).square().mean())
            for states, (root, _) in zip(calibration.states, calibration.roots, strict=True)
        ]
        step = math.sqrt(sum(energies) / len(energies)) / 4
        chain = fit_chain(calibration, step, QUICK)
        for _ in range(TRIES):
            ratio = chain.bytes_per_token(*calibration.held_out) / bytes_per_token
            step *= min(MOST_CHANGE, max(1 / MOST_CHANGE, ratio**SLOPE))
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
            chain = with_step(chain, calibration, min(MOST_CHANGE, max(1 / MOST_CHANGE, ratio**SLOPE)))
    return chain


@torch.no_grad()
def weighed(calibration: Calibration, model: PreTrainedModel, ids: Tensor, bytes_per_token: float) -> Calibration:
    """Return a calibration whose metrics say what errors cost in KL, from windows (N, T) of calibration text.

    The factor of a layer is the KL that its errors cost over these errors in the calibration's metric.
    `bytes_per_token` are those of the codes whose errors are measured.
    """
    chain, _ = quick_fit(calibration, bytes_per_token)
    shapes = calibration.shapes
    few = ids[:: max(1, len(ids) // WINDOWS)][:WINDOWS]
    length = ids.shape[1] // PART
    kl, energy = torch.zeros(2, len(shapes), dtype=torch.float64)
    with evaluating(model), progress("measuring what layers cost", len(few)) as bar:
        for done, window in enumerate(few.to(model.device), 1):
            before, after = window[None, :-length], window[None, -length:]
            cache = prefill(model, before)
            states = read_states(cache, 0, 0, before.shape[1], shapes)
            steps = step_sizes(chain.importance.steps(states, shapes, before.shape[1]))
            _, stored = code_layers(chain.layers, states, steps)
            for layer_states, layer_stored in zip(states, stored, strict=True):
                if len(layer_states) == len(steps):  # it holds the first token, which is stored as it is
                    layer_stored[0] = layer_states[0]
            decoded = new_cache([stored], shapes, [0], before.shape[1], model.dtype)
            exact = continued(model, deepcopy(cache), after)
            # the KLs of single layers add up to that of the whole cache, so that each is measured alone
            for layer, (root, _) in enumerate(calibration.roots):
                mixed = deepcopy(cache)
                mixed.layers[layer] = decoded.layers[layer]  # the model adds to it, and it is not used again
                approximate = continued(model, mixed, after)
                error = (states[layer] - stored[layer]) @ root / steps[len(steps) - len(stored[layer]) :, None]
                kl[layer] += float((exact.exp() * (exact - approximate)).sum(-1).mean())
                energy[layer] += float(error.square().sum(1).mean())
            bar.step(done, len(few))
    # factors relative to each other: what all layers have in common is the step's
    factors = (kl / energy.clamp_min(1e-30)).clamp_min(1e-12).log() * FACTOR_POWER
    factors = (factors - factors.mean()).exp().tolist()
    weighed_metric = [metric * factor for metric, factor in zip(calibration.metric, factors, strict=True)]
    return replace(calibration, metric=weighed_metric)
