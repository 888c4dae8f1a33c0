"""Fit latents to text: what each layer caches, with how many bits, so that an error costs least.

For a layer's keys and values y (before qk-norm and rotary embedding) and those of the layer below as they are read, ŷ:

    r = y − m − A (ŷ_below − m_below),   A = Cov(y, y_below) (Cov(y_below) + Cov(error of ŷ_below))⁻¹
    G = E[g gᵀ],  g = the gradient of the loss in y on the model's own samples (the Fisher information)
    G^½ Cov(r) G^½ = E Λ Eᵀ,   latent c = Λ^(−½) Eᵀ G^½ r,   r ≈ G^(−½) E Λ^½ c

So an error of variance v in a channel of c costs v λ / 2 nats a token, in any layer. Bits go to the channel where one
more saves most, until the budget is spent: reverse water-filling, as in the coding of Gaussian sources.

Shapes: N sequences, T tokens, C hidden, W = 2·H_kv·D channels of keys and values, L layers, R channels of a latent.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from crosslayer.core.decoder.modeling import CrossLayerForCausalLM
from crosslayer.core.latents import ERRORS, SCALE, STEPS, UNIT, WHOLE, LatentMethod
from crosslayer.core.method import Method
from crosslayer.core.plan import DepthPlan
from crosslayer.corpus.windows import repeating
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.retrofit.streams import layers_of

MOST_TOKENS = 16_384  # of the calibration text, since gradients are needed
RIDGE = 0.01  # of the mean eigenvalue, is added to Fisher information, which a few thousand tokens do not fill
SMALLEST = 1e-4  # of the mean variance, is added to every variance: other text may vary where calibration text did not
FIRST = 32  # times as much as any other counts the first token of a text, to which much of attention goes
ROUNDS = 3  # the bits decide on the errors of the layer below, and those on the bits


@dataclass(frozen=True)
class StateMoments:
    """A layer's keys and values: mean (W,), covariance, that with the layer below, and Fisher information, (W, W)."""

    mean: Tensor
    covariance: Tensor
    with_below: Tensor | None  # E[(y − m)(y_below − m_below)ᵀ]
    information: Tensor


class Basis(NamedTuple):
    """What a layer's latent consists of: r ≈ up @ c and c = down @ r, of channels with falling `cost` (W,)."""

    below: Tensor | None  # A (W, W)
    down: Tensor  # (W, W)
    up: Tensor  # (W, W)
    cost: Tensor  # λ: nats a token per variance of an error in a channel, times two


def measure_moments(
    model: CrossLayerForCausalLM,
    text: Mapping[str, Tensor],
    plan: DepthPlan,
    seed: int = 0,
) -> list[StateMoments]:
    """Return the moments of each layer's keys and values on text, windows (N, T) by domain.

    Args:
        model: the plain decoder.
        text: calibration ids; at most about `MOST_TOKENS` of them are read, as many of each domain, and the last third
            of a window is replaced by its beginning, since what copies from the context matters as much.
        plan: says which layer reads which below.
        seed: of the tokens that the model samples.

    """
    sums = [_Sums(model.device) for _ in range(plan.layers)]
    for states in _windows(model, text, seed, "measuring keys and values"):
        for layer, (own, total) in enumerate(zip(states, sums, strict=True)):
            assert own is not None
            below = [other.value for i in _below(plan, layer) if (other := states[i]) is not None]
            total.add(own.value, own.gradient, below)
    means = [total.mean for total in sums]
    return [total.moments([means[i] for i in _below(plan, layer)]) for layer, total in enumerate(sums)]


def with_errors(
    model: CrossLayerForCausalLM,
    moments: Sequence[StateMoments],
    text: Mapping[str, Tensor],
    seed: int = 0,
) -> list[StateMoments]:
    """Return moments whose Fisher information is that of a model with latents, which were fitted by `moments`.

    Where a model copies from its context it is so sure that small errors cost nothing and larger ones everything. The
    information where errors are as large as they will be shows that.
    """
    sums: list[Tensor] = [torch.zeros_like(own.information) for own in moments]
    tokens = 0
    for states in _windows(model, text, seed, "measuring what errors cost"):
        for layer, state in enumerate(states):
            if state is not None:
                gradient = state.gradient[1:].double()
                sums[layer] += gradient.T @ gradient
        tokens += max(len(state.value) for state in states if state is not None)
    return [
        dataclasses.replace(own, information=total / tokens) if model.config.plan.latents[layer] is not None else own
        for layer, (own, total) in enumerate(zip(moments, sums, strict=True))
    ]


def read_windows(text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those windows (N, T) of each domain from which moments are measured."""
    length = next(iter(text.values())).shape[1]
    each = max(1, MOST_TOKENS // length // len(text))
    return {name: ids[:each] for name, ids in text.items()}


def levels_of(axes: Collection[str]) -> range:
    """Return the bits that a channel may have: codes with the axis "bits", and 0 with the axis "rank"."""
    if "bits" not in axes:
        return range(0, WHOLE + 1, WHOLE)
    return range(0 if "rank" in axes else 1, max(STEPS) + 1)


def choose_bits(
    moments: Sequence[StateMoments], plan: DepthPlan, share: float, levels: range = range(max(STEPS) + 1)
) -> tuple[tuple[int, ...], ...]:
    """Return the bits of each eight channels of each layer, one of `levels`, for a share of the cache in 16 bits.

    Raises:
        ValueError: the share is too small for a channel in each layer, or leaves nothing to save.

    """
    layers, width = plan.layers, len(moments[0].mean)
    units = width // UNIT
    if width % UNIT:
        raise ValueError(
            f"bits are chosen for {UNIT} channels at a time, and keys and values have {width}; give a rank"
        )
    scales = 0 if WHOLE in levels else SCALE * layers
    spent = round(share * 2 * width * layers) - scales
    first = torch.zeros(layers, units, dtype=torch.long)  # indices into `levels`
    first[:, 0] = levels[0] == 0  # no layer is without a latent
    least, most = layers * units * levels[0] + int(first.sum()) * levels.step, layers * units * levels[-1]
    if not least <= spent <= most:
        ends = ((size + scales) / (2 * width * layers) for size in (least, most))
        raise ValueError("`kv_budget` must be {:.3f} to {:.3f} for these latents, got {:g}".format(*ends, share))
    errors = torch.tensor([ERRORS[number] for number in levels], dtype=torch.float64)
    gains = torch.cat([errors[:-1] - errors[1:], torch.zeros(1, dtype=torch.float64)])  # of the next level
    chosen = torch.zeros_like(first)
    for _ in range(ROUNDS):
        bases = find_bases(moments, plan, errors[chosen.repeat_interleave(UNIT, 1)])
        cost = torch.stack([basis.cost for basis in bases]).unflatten(1, (units, UNIT)).mean(-1).cpu()  # (L, units)
        chosen = first.clone()
        for _ in range((spent - least) // levels.step):
            best = int((cost * gains[chosen]).argmax())
            chosen.view(-1)[best] += 1
    return tuple(tuple(levels[index] for index in row) for row in chosen.tolist())


def find_bases(moments: Sequence[StateMoments], plan: DepthPlan, errors: Tensor) -> list[Basis]:
    """Return the basis of each layer's latent, whose channels are read with mean square `errors` (L, W)."""
    bases, read_errors = [], []
    for layer, own in enumerate(moments):
        covariance, prediction = own.covariance, None
        for below in _below(plan, layer):
            assert own.with_below is not None
            read = moments[below].covariance + read_errors[below]
            prediction = torch.linalg.solve(_ridged(read, SMALLEST), own.with_below.T).T
            told = prediction @ own.with_below.T
            covariance = covariance - told - told.T + prediction @ read @ prediction.T
        basis = _basis(covariance, own.information, prediction)
        bases.append(basis)
        read_errors.append((basis.up * errors[layer].to(basis.up)) @ basis.up.T)
    return bases


@torch.no_grad()
def fit_latents(original: CrossLayerForCausalLM, model: CrossLayerForCausalLM, moments: Sequence[StateMoments]) -> None:
    """Set the weights of every latent of `model` by the moments of `original`, the plain decoder."""
    plan, width = model.config.plan, len(moments[0].mean)
    method = latent_of(model.config.methods)
    assert method is not None
    errors = torch.tensor([method.errors(layer, width) for layer in range(plan.layers)], dtype=torch.float64)
    bases = find_bases(moments, plan, errors)
    for layer, (before, after) in enumerate(zip(layers_of(original), layers_of(model), strict=True)):
        if plan.latents[layer] is None:
            continue  # another method drops its attention
        attention: nn.Module | None = after.self_attn
        assert attention is not None and before.self_attn is not None
        keys, values = before.self_attn.k_proj, before.self_attn.v_proj
        assert keys is not None and values is not None
        steps = method.steps(layer)
        below = [moments[i].mean for i in _below(plan, layer)]
        _write(attention, (keys, values), bases[layer], moments[layer].mean, below, steps)


def latent_of(methods: Sequence[Method]) -> LatentMethod | None:
    """Return the method among several that gives layers latents."""
    return next((method for method in methods if isinstance(method, LatentMethod)), None)


def within_axes(method: Method, axes: Collection[str]) -> Method:
    """Return a method whose layers read no layer below without the axis "depth"."""
    assert isinstance(method, LatentMethod)
    return method if "depth" in axes else dataclasses.replace(method, groups=())


def with_bits(method: Method, moments: Sequence[StateMoments], share: float | None, levels: range) -> Method:
    """Return a method whose latents have bits, of some levels, for a share of the cache; None: as they are."""
    assert isinstance(method, LatentMethod)
    if share is None:
        return method
    return dataclasses.replace(method, bits=choose_bits(moments, method.plan(len(moments)), share, levels))


def _write(
    attention: nn.Module,
    projections: Sequence[nn.Linear],
    basis: Basis,
    mean: Tensor,
    below: Sequence[Tensor],
    steps: Sequence[float] | None,
) -> None:
    """Set the weights of a layer's encoder and decoder; `steps` (R,) are those between codes."""
    encoder, decoder = attention.get_submodule("latent_encoder"), attention.get_submodule("latent_decoder")
    channels = decoder.get_parameter("up.weight").shape[1]
    down, up = basis.down[:channels], basis.up[:, :channels]  # (R, W), (W, R)
    weight = torch.cat([projection.weight for projection in projections]).to(down)  # (W, C)
    offset = -mean
    if projections[0].bias is not None:
        offset = offset + torch.cat([projection.bias for projection in projections]).to(down)
    told = torch.zeros_like(mean)
    if basis.below is not None:
        told = basis.below @ below[0]
        encoder.get_parameter("below.weight").copy_(down @ basis.below)
        decoder.get_parameter("below.weight").copy_(basis.below)
    encoder.get_parameter("down.weight").copy_(down @ weight)
    encoder.get_parameter("down.bias").copy_(down @ (offset + told))
    decoder.get_parameter("up.weight").copy_(up if steps is None else up * torch.tensor(steps).to(up))
    decoder.get_parameter("up.bias").copy_(mean - told)


def _basis(covariance: Tensor, information: Tensor, below: Tensor | None) -> Basis:
    """Return the channels in which errors of states with a covariance (W, W) cost most."""
    values, vectors = torch.linalg.eigh(_ridged(information, RIDGE))
    root, inverse = (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T
    cost, rotation = torch.linalg.eigh(root @ _ridged((covariance + covariance.T) / 2, SMALLEST) @ root)
    cost, rotation = cost.flip(0).clamp(min=torch.finfo(cost.dtype).tiny ** 0.5), rotation.flip(1)
    spread = cost.sqrt()
    return Basis(below, (rotation / spread).T @ root, inverse @ (rotation * spread), cost)


def _ridged(matrix: Tensor, share: float) -> Tensor:
    """Return a symmetric matrix with a share of its mean eigenvalue added to each, against what text did not show."""
    return matrix + share * matrix.diagonal().mean() * torch.eye(len(matrix)).to(matrix)


def _below(plan: DepthPlan, layer: int) -> list[int]:
    """Return the layer below of a layer with a latent, if it reads one."""
    return [source for source in plan.reads("keys", layer) if source != layer]


class _State(NamedTuple):
    """A layer's keys and values as it reads them, and the gradients of the loss in them, (T, W) each."""

    value: Tensor
    gradient: Tensor


def _windows(
    model: CrossLayerForCausalLM,
    text: Mapping[str, Tensor],
    seed: int,
    doing: str,
) -> Iterator[list[_State | None]]:
    """Yield the states of each layer on each window; None: a layer without attention."""
    windows, _ = repeating(torch.cat(list(read_windows(text).values())))
    generator = torch.Generator(model.device).manual_seed(seed)
    bars = progress(doing, len(windows))
    with evaluating(model), torch.enable_grad(), _recorded(model) as recorded, bars as bar:
        for number, ids in enumerate(windows, 1):
            embeddings = model.get_input_embeddings()(ids[None].to(model.device)).detach().requires_grad_()
            logits = model(inputs_embeds=embeddings, use_cache=False).logits[0].float()
            sampled = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            functional.cross_entropy(logits, sampled, reduction="sum").backward()
            yield [_state(recorded[layer]) if layer in recorded else None for layer in range(len(layers_of(model)))]
            recorded.clear()
            bar.step(number, len(windows))


def _state(outputs: Sequence[Tensor]) -> _State:
    """Return the state that outputs (1, T, …) of one layer's modules make up."""
    gradients = [output.grad[0] for output in outputs if output.grad is not None]
    return _State(torch.cat([output.detach()[0] for output in outputs], -1), torch.cat(gradients, -1))


@contextmanager
def _recorded(model: CrossLayerForCausalLM) -> Iterator[dict[int, list[Tensor]]]:
    """Record keys and values of each layer, with gradients: what projections return, or what is made of latents."""
    recorded: dict[int, list[Tensor]] = {}

    def record(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            output.retain_grad()
            recorded.setdefault(layer, []).append(output)

        return hook

    def without_below(module: nn.Module, inputs: tuple) -> tuple:
        states, below = inputs  # an error below is counted there
        return states, None if below is None else below.detach()

    hooks = []
    for layer, block in enumerate(layers_of(model)):
        attention = block.self_attn
        if attention is None:
            continue
        names = ("k_proj", "v_proj") if attention.latent_decoder is None else ("latent_decoder",)
        hooks += [attention.get_submodule(name).register_forward_hook(record(layer)) for name in names]
        latent = () if attention.latent_decoder is None else (attention.latent_encoder, attention.latent_decoder)
        hooks += [module.register_forward_pre_hook(without_below) for module in latent if module is not None]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


class _Sums:
    """Sums over tokens of a layer's keys and values and of their gradients."""

    def __init__(self, device: torch.device):
        self.tokens, self.windows, self.device = 0.0, 0, device
        self.total = self.square = self.with_below = self.information = torch.zeros((), dtype=torch.float64).to(device)

    def add(self, states: Tensor, gradients: Tensor, below: Sequence[Tensor]) -> None:
        """Add a window: states and gradients (T, W), and the states of the layer below, if any."""
        weights = torch.ones(len(states), 1, dtype=torch.float64, device=self.device)
        weights[0] = FIRST
        states, gradients = states.double(), gradients.double()
        self.tokens += float(weights.sum())
        self.total = self.total + (weights * states).sum(0)
        self.square = self.square + (weights * states).T @ states
        for other in below:
            self.with_below = self.with_below + (weights * states).T @ other.double()
        self.windows += len(states)
        self.information = self.information + gradients[1:].T @ gradients[1:]

    @property
    def mean(self) -> Tensor:
        """The mean (W,)."""
        return self.total / self.tokens

    def moments(self, below: Sequence[Tensor]) -> StateMoments:
        """Return the moments; `below` is the mean of the layer below, if any."""
        with_below = None
        for other in below:
            with_below = self.with_below / self.tokens - torch.outer(self.mean, other)
        covariance = self.square / self.tokens - torch.outer(self.mean, self.mean)
        return StateMoments(self.mean, covariance, with_below, self.information / self.windows)
