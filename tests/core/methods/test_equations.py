"""Each method's equation against loops that do not use the plan, the carry or the cache.

1e-6, not 1e-10: the model's norms compute in float32 whatever the dtype, so that a rounding of 1e-16 before a norm can
become 6e-8 after it (SDPA and the loops sum in another order). A wrong wiring moves the logits by more than 1e-2.
"""

import math

import pytest
import torch

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.core.methods.shared_choice import SharedChoice
from crosslayer.testing.tiny import build, config_of, steps
from tests.core.methods.naive import Naive, attend, check, softmax_map
from tests.helpers.eager import use_float64_softmax
from tests.helpers.tiny import tokens


def test_the_plain_decoder():
    check(build(config_of([])), Naive)


@pytest.mark.parametrize(("group", "start", "end"), [(2, 0, None), (3, 0, None), (4, 1, 6), (2, 2, 5)])
def test_cla(group, start, end):
    class Loops(Naive):
        def states(self, layer, normed):
            last = 6 if end is None else end
            inside = start <= layer < last
            source = start + (layer - start) // group * group if inside else layer
            q = self.raw_state(layer, normed, "q")
            if source == layer:
                return q, self.raw_state(layer, normed, "k"), self.raw_state(layer, normed, "v")
            return q, self.used["k"][source], self.used["v"][source]

    check(build(config_of([{"name": "cla", "group": group, "start": start, "end": end}])), Loops)


@pytest.mark.parametrize("groups", [((1, 5),), ((0, 4), (1, 2, 5)), ((0, 1, 2, 3, 4, 5),)])
def test_cla_between_any_layers(groups):
    sources = {reader: source for source, *readers in groups for reader in readers}

    class Loops(Naive):
        def states(self, layer, normed):
            q, source = self.raw_state(layer, normed, "q"), sources.get(layer)
            if source is not None:
                return q, self.used["k"][source], self.used["v"][source]
            return q, self.raw_state(layer, normed, "k"), self.raw_state(layer, normed, "v")

    check(build(config_of([{"name": "cla", "groups": groups}])), Loops)


@pytest.mark.parametrize("target", ["attention", "heads"])
def test_w_c(target):
    """Drop with W_c instead of attention, and CLA with W_c before W_o: token by token."""
    drop = {"name": "drop", "attention": (1, 4), "compensation": "attention"}
    cla = {"name": "cla", "groups": ((2, 3),), "compensation": "heads"}

    class Loops(Naive):
        def w_c(self, layer, normed):
            module = self.layers[layer].compensation
            return torch.stack([module.weight @ row for row in normed])

        def states(self, layer, normed):
            q, k, v = (None,) * 3 if layer == 3 and target == "heads" else super().states(layer, normed)
            if q is None:
                return self.raw_state(layer, normed, "q"), self.used["k"][2], self.used["v"][2]
            return q, k, v

        def added(self, layer, normed):
            if target == "heads" and layer == 3:
                return self.layers[layer].self_attn.o_proj(self.w_c(layer, normed))
            return 0

        def run(self, ids):
            x = self.model.model.embed_tokens(ids)
            for number, layer in enumerate(self.layers):
                normed = layer.input_layernorm(x)
                if layer.self_attn is None:
                    x = x + self.w_c(number, normed)
                else:
                    q, k, v = self.states(number, normed)
                    self.used["k"][number], self.used["v"][number] = k, v
                    x = x + layer.self_attn.o_proj(attend(self.model, number, q, k, v)) + self.added(number, normed)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            return self.model.lm_head(self.model.model.norm(x))

    model = build(config_of([drop if target == "attention" else cla]))
    fitted = [layer.compensation.weight for layer in model.model.layers if layer.compensation is not None]
    assert all(weight.abs().max() > 0.1 for weight in fitted)
    check(model, Loops)


@pytest.mark.parametrize(
    ("share", "letters"), [("values", "v"), ("queries", "q"), ("keys", "k"), (("keys", "values"), "kv")]
)
@pytest.mark.parametrize("anchors", [(0,), (0, 2, 5)])
def test_svformer(share, letters, anchors):
    class Loops(Naive):
        def states(self, layer, normed):
            anchor = max(a for a in anchors if a <= layer)
            return tuple(
                self.used[name][anchor]
                if name in letters and layer not in anchors
                else self.raw_state(layer, normed, name)
                for name in "qkv"
            )

    check(build(config_of([{"name": "svformer", "share": share, "anchors": anchors}])), Loops)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # with eager attention readers use the source's map
@pytest.mark.parametrize("target", ["attention", "heads", "mlp", "heads-from-values", None])
def test_uniattn(target, attention, monkeypatch):
    blocks = ((1, 2, 3), (4, 5))

    class Loops(Naive):
        def source(self, layer):
            return next((b[0] for b in blocks if layer in b), layer)

        def states(self, layer, normed):
            source, v = self.source(layer), self.raw_state(layer, normed, "v")
            if source == layer:
                return self.raw_state(layer, normed, "q"), self.raw_state(layer, normed, "k"), v
            return self.used["q"][source], self.used["k"][source], v

        def added(self, layer, normed):
            if target is None or self.source(layer) == layer:
                return 0
            weight = self.layers[layer].compensation.weight
            read = self.layers[layer].self_attn.v_proj(normed) if target == "heads-from-values" else normed
            update = torch.stack([sum(weight[:, c] * row[c] for c in range(len(row))) for row in read])
            # W_o is linear and has no bias here, so what is added before it is added after it
            return self.layers[layer].self_attn.o_proj(update) if "heads" in target else update

        def run(self, ids):
            if target != "mlp":
                return super().run(ids)
            x = self.model.model.embed_tokens(ids)
            for number, layer in enumerate(self.layers):
                normed = layer.input_layernorm(x)
                q, k, v = self.states(number, normed)
                self.used["q"][number], self.used["k"][number] = q, k
                x = x + layer.self_attn.o_proj(attend(self.model, number, q, k, v))  # W_c must not reach the MLP's norm
                x = x + layer.mlp(layer.post_attention_layernorm(x)) + self.added(number, normed)
            return self.model.lm_head(self.model.model.norm(x))

    model = build(config_of([{"name": "uniattn", "superblocks": blocks, "compensation": target}]))
    model.set_attn_implementation(attention)
    use_float64_softmax(monkeypatch)
    check(model, Loops)


def test_a_w_c_of_the_values_needs_a_w_v():
    uniattn = {"name": "uniattn", "superblocks": ((2, 3),), "compensation": "heads-from-values"}
    with pytest.raises(ValueError, match="layer 3:.*W_v;.*'heads'"):
        config_of([uniattn, "svformer"])
    with pytest.raises(ValueError, match="'attention', 'heads', 'mlp'"):
        config_of([{"name": "cla", "compensation": "heads-from-values"}])


def test_drop():
    model = build(config_of([{"name": "drop", "attention": (0, 3), "mlp": (2,), "layers": (4,)}]))
    existing = [(layer.self_attn is not None, layer.mlp is not None) for layer in model.model.layers]
    assert existing == [(False, True), (True, True), (True, False), (False, True), (False, False), (True, True)]
    check(model, Naive)


RESFORMERS = [
    {"mode": "identity"},
    {"mode": "constant"},
    {"mode": "sparse"},
    {"mode": "learnable"},
    {"mode": "learnable", "source": "previous"},
    {"mode": "learnable", "source": "all"},
    {"mode": "identity", "source": "all"},
    {"mode": "constant", "source": "all"},
    {"mode": "dense", "source": "all"},
    {"mode": "identity", "of": "queries"},
    {"mode": "identity", "of": "keys", "source": "all"},
    {"mode": "learnable", "of": "keys", "source": "all"},
    {"mode": "constant", "weights": [3.0]},
    {"mode": "constant", "weights": [0.0, 0.5, 1.0, 2.0, 3.0]},
    {"mode": "learnable", "weights": [2.0]},
    {"mode": "learnable", "source": "previous", "of": "queries"},
]


@pytest.mark.parametrize("options", RESFORMERS, ids=str)
def test_resformer(options):
    name = options.get("of", "values")[0]
    source, mode = options.get("source", "first"), options["mode"]

    class Loops(Naive):
        def states(self, layer, normed):
            states = dict(zip("qkv", super().states(layer, normed), strict=True))
            raw = self.raw[name]
            if layer:
                mixers = [each.self_attn.mixers[0] for each in self.layers]
                if mode in ("learnable", "dense"):
                    weights = mixers[layer].weights
                elif "weights" in options:
                    weights = ((options["weights"] * 5)[layer - 1], 1)
                else:
                    half = (layer / (layer + 1), 1 / (layer + 1)) if source == "all" else (0.5, 0.5)
                    fixed = {"identity": half, "constant": (2, 1), "sparse": (5, 1) if layer >= 4 else (0, 1)}
                    weights = fixed[mode]
                if mode == "dense":
                    states[name] = sum(weights[i] * raw[i] for i in range(layer + 1))
                else:
                    below = {"first": [0], "previous": [layer - 1], "all": range(layer)}[source]
                    added = sum(raw[i] for i in below) / len(below)
                    states[name] = weights[0] * added + weights[1] * raw[layer]
            return states["q"], states["k"], states["v"]

    check(build(config_of([{"name": "resformer", **options}])), Loops)


def test_resformer_s_trained_weights_begin_where_they_should():
    def mixers(**options):
        model = CrossLayerForCausalLM(config_of([{"name": "resformer", **options}]))
        return [layer.self_attn.mixers[0] for layer in model.model.layers]

    plain = mixers(mode="learnable")
    assert plain[0].weights is None and [mixer.weights.tolist() for mixer in plain[1:]] == [[0.5, 0.5]] * 5
    by_layer = mixers(mode="learnable", weights=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert [mixer.weights.tolist() for mixer in by_layer[1:]] == [[float(i), 1.0] for i in range(1, 6)]


@pytest.mark.parametrize("mode", ["identity", "learnable", "dense"])
def test_resformer_of_all_layers_begins_with_the_mean_of_their_values(mode):
    """The paper's Eq. 5: 1 / n for each of n layers, as the weight of each value that attention reads says."""

    class Loops(Naive):
        def states(self, layer, normed):
            q, k, _ = super().states(layer, normed)
            return q, k, sum(self.raw["v"][i] for i in range(layer + 1)) / (layer + 1)

    config = config_of([{"name": "resformer", "mode": mode, "source": "all"}])
    torch.manual_seed(0)
    check(CrossLayerForCausalLM(config).double().eval(), Loops)


@pytest.mark.parametrize("block", [None, 1, 2, 5, 12])
def test_attnres(block):
    size = block or 1

    class Loops(Naive):
        def run(self, ids):
            outputs = [self.model.model.embed_tokens(ids)]  # v_0, then every sublayer's output
            sublayers = [(i, site) for i in range(6) for site in ("attn", "mlp")]
            for number, (i, site) in enumerate(sublayers):
                layer = self.layers[i]
                x = self.depth(outputs, number, getattr(layer, f"{site}_residual"))
                if site == "attn":
                    q, k, v = self.states(i, layer.input_layernorm(x))
                    outputs.append(layer.self_attn.o_proj(attend(self.model, i, q, k, v)))
                else:
                    outputs.append(layer.mlp(layer.post_attention_layernorm(x)))
            x = self.depth(outputs, 12, self.model.model.final_residual, final=True)
            return self.model.lm_head(self.model.model.norm(x))

        def depth(self, outputs, number, residual, final=False):
            sources = [outputs[0]]
            blocks = [outputs[1 + s : 1 + min(s + size, number)] for s in range(0, number, size)]
            sources += [sum(block) for block in blocks if block]
            expected = -(-12 // size) + 1 if final else number // size + 1 + (number % size > 0)
            assert len(sources) == expected  # ⌊l/S⌋ + 1 + [l mod S > 0]; at the output ⌈L/S⌉ + 1
            if len(sources) == 1:
                return sources[0]
            result = torch.zeros_like(sources[0])
            for t in range(len(result)):
                logits = []
                for v in (s[t] for s in sources):
                    normed = v / torch.sqrt((v * v).mean() + 1e-6) * residual.gain
                    logits.append(float(residual.query @ normed))
                shares = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)
                result[t] = sum(share * s[t] for share, s in zip(shares, sources, strict=True))
            return result

    check(build(config_of([{"name": "attnres", "block": block}])), Loops)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (4, 5), (3, 2)])
@pytest.mark.parametrize(
    "dropped", [{}, {"attention": (0, 3), "mlp": (5,)}, {"layers": (2,)}, {"layers": (0,)}], ids=str
)
def test_denseformer(dilation, period, dropped):
    class Loops(Naive):
        def run(self, ids):
            y = self.model.model.embed_tokens(ids)
            outputs = [y]  # X_0, X_1, …
            for number, layer in enumerate(self.layers):
                if layer.self_attn is None and layer.mlp is None:
                    continue
                x = y
                if layer.self_attn is not None:
                    q, k, v = self.states(number, layer.input_layernorm(x))
                    x = x + layer.self_attn.o_proj(attend(self.model, number, q, k, v))
                if layer.mlp is not None:
                    x = x + layer.mlp(layer.post_attention_layernorm(x))
                outputs.append(x)
                y, i = x, len(outputs) - 1
                if i % period == 0:
                    weights = (layer.attn_residual if layer.mlp is None else layer.mlp_residual).weights
                    terms = [j for j in range(i + 1) if (i - j) % dilation == 0]
                    y = sum(weights[index] * outputs[j] for index, j in enumerate(terms))
            return self.model.lm_head(self.model.model.norm(y))

    methods = [{"name": "denseformer", "dilation": dilation, "period": period}, {"name": "drop", **dropped}]
    check(build(config_of(methods)), Loops)


CHOICES = {
    "two key-value heads": (SharedChoice(groups=((0, 1, 4), (2, 3, 5)), tokens=5, sinks=1, window=2), {}),
    "one key-value head, a share": (
        SharedChoice(groups=((1, 3), (2, 4, 5)), tokens=0.3, sinks=0, window=1, least=0),
        {"num_key_value_heads": 1},
    ),
    "a share of the tokens with a minimum": (
        SharedChoice(groups=((0, 1, 2), (3, 4, 5)), tokens=0.3, sinks=0, window=1, least=3, sparse_choosers=(3,)),
        {},
    ),
    "as many, other heads, own choice": (
        SharedChoice(
            groups=((0, 2, 5), (3,)),
            tokens=4,
            sinks=2,
            window=1,
            sparse_choosers=(0, 3),
            chooser_heads=((), (), (3, 3, 0, 1), (), (), (1, 0, 3, 2)),
        ),
        {"num_key_value_heads": 4, "qk_norm": False},
    ),
}


class Chooses(Naive):
    """Chooses, masks and attends token by token, as docs/methods/overview.md says."""

    def __init__(self, model):
        super().__init__(model)
        self.method, self.choices = model.config.methods[0], {}
        self.chooser_of = {layer: group[0] for group in self.method.groups for layer in group}

    def attention(self, layer, q, k, v):
        chooser = self.chooser_of.get(layer)
        scale, groups = self.layers[layer].self_attn.scaling, len(q) // len(k)
        maps = [softmax_map(q[h], k[h // groups], scale) for h in range(len(q))]
        if chooser == layer:
            self.choices[layer] = [self.chosen(maps[h * groups : (h + 1) * groups]) for h in range(len(k))]
        heads = []
        for h, weights in enumerate(maps):
            pair = h // groups
            if chooser is not None and (chooser != layer or layer in self.method.sparse_choosers):
                named = self.method.chooser_heads[layer] if self.method.chooser_heads else ()
                choice = self.choices[chooser][named[pair] if named else pair]
                for row, kept in enumerate(choice):
                    for column in range(len(weights)):
                        if column not in kept:
                            weights[row, column] = 0
                    weights[row] /= weights[row].sum()
            heads.append(weights @ v[pair])
        return torch.cat(heads, -1)

    def chosen(self, maps):
        """Return, for each token, the set of tokens that one key-value head chooses."""
        method, result = self.method, []
        for row in range(len(maps[0])):
            seen = row + 1
            count = int(method.tokens)
            if method.tokens < 1:
                count = max(math.ceil(method.tokens * seen - 1e-9), method.sinks + method.window, method.least)
            mass = [sum(float(weights[row, column]) for weights in maps) for column in range(seen)]
            always = [column for column in range(seen) if column < method.sinks or column >= seen - method.window]
            others = sorted((column for column in range(seen) if column not in always), key=lambda j: -mass[j])
            result.append(set((always + others)[: max(count, len(always))]))
        return result


@pytest.mark.parametrize("case", CHOICES)
def test_shared_choice(case):
    method, shape = CHOICES[case]
    check(build(config_of(method, **shape)), Chooses, length=13)


@pytest.mark.parametrize("case", CHOICES)
def test_shared_choice_with_a_cache(case):
    """Token by token through a cache, and in two pieces."""
    method, shape = CHOICES[case]
    model, ids = build(config_of(method, **shape)), tokens(batch=1, length=13)
    with torch.no_grad():
        expected = Chooses(model).run(ids[0])
    for sizes in ([1] * 13, [8, 3, 1, 1]):
        assert (steps(model, ids, sizes)[0][0] - expected).abs().max() < 1e-6
