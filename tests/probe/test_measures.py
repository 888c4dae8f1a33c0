"""Every measure against naive loops in float64, on tiny models with GQA, a sliding window and soft-capping.

The loops start from the model's own hidden states (bit-equal in both runs), because Hugging Face's RMSNorm computes in
float32 and would turn a rounding of 1e-16 into 1e-8. From there both sides are float64, so 1e-10 leaves room for the
order of sums alone.
"""

import importlib
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

import crosslayer
from crosslayer.probe import measures as m
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.maps import map_sums
from crosslayer.stats.bootstrap import by_position, measure
from tests.helpers.tiny import tiny, tokens

TOLERANCE = 1e-10
FAMILIES = ["llama", "mistral", "gemma2", "bert"]


class Naive:
    """One sequence, everything by loops and from the model's submodules."""

    def __init__(self, model, ids):
        self.model, self.family = model, model.config.model_type
        self.layers = model.encoder.layer if self.family == "bert" else model.model.layers
        self.kept = {}
        hooks = [h for i, layer in enumerate(self.layers) for h in self.watch(i, layer)]
        with torch.no_grad():
            found = model(input_ids=ids[None], output_hidden_states=True)
            self.hidden = [h[0] for h in found.hidden_states]
            # the last entry of hidden_states is normalized in decoders: take the layer's own output
            self.after = [self.kept["after", i] for i in range(len(self.layers))]
            self.maps, self.values = zip(*(self.attend(i) for i in range(len(self.layers))), strict=True)
        for hook in hooks:
            hook.remove()

    def watch(self, i, layer):
        def keep(what):
            def hook(_, args, output):
                self.kept[what, i] = (output[0] if isinstance(output, tuple) else output).reshape(-1, 32)

            return hook

        if self.family == "bert":
            update, mlp = layer.attention.output.dense, layer.output.dense
        else:
            update = layer.post_attention_layernorm if self.family == "gemma2" else layer.self_attn
            mlp = layer.post_feedforward_layernorm if self.family == "gemma2" else layer.mlp
        pairs = ((layer, "after"), (update, "attention"), (mlp, "mlp"))
        return [module.register_forward_hook(keep(what)) for module, what in pairs]

    def attend(self, i):
        """Return the maps (H, T, T) and the values (H_kv, T, D) of layer i."""
        layer, x, config = self.layers[i], self.hidden[i], self.model.config
        heads = config.num_attention_heads
        if self.family == "bert":
            own = layer.attention.self
            q, k, v = (w(x).view(len(x), heads, -1).transpose(0, 1) for w in (own.query, own.key, own.value))
            scale = q.shape[-1] ** -0.5
        else:
            own, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                w(normed).view(len(x), -1, own.head_dim).transpose(0, 1) for w in (own.q_proj, own.k_proj, own.v_proj)
            )
            positions = torch.arange(len(x))[None]
            cos, sin = self.model.model.rotary_emb(x, positions)
            file = importlib.import_module(type(own).__module__)
            q, k = file.apply_rotary_pos_emb(q[None], k[None], cos, sin)
            q, k, scale = q[0], k[0], own.scaling
        window = None
        if self.family == "mistral" or (self.family == "gemma2" and config.layer_types[i] == "sliding_attention"):
            window = 8
        maps = torch.zeros(heads, len(x), len(x), dtype=torch.float64)
        for h in range(heads):
            for row in range(len(x)):
                scores = {}
                for column in range(len(x)):
                    future, far = column > row, window is not None and column <= row - window
                    if self.family != "bert" and (future or far):
                        continue
                    score = float(q[h, row] @ k[h // (heads // len(k)), column]) * scale
                    scores[column] = 2.0 * math.tanh(score / 2.0) if self.family == "gemma2" else score
                total = sum(math.exp(s) for s in scores.values())
                for column, score in scores.items():
                    maps[h, row, column] = math.exp(score) / total
        return maps, v

    def expected(self):
        found, count = {}, len(self.layers)
        for name in ("first_token_share", "entropy", "sink_rate", "value_norm_ratio", "hidden_norm_ratio", "mlp_l1_l2",
                     "token_similarity", "attention_io_similarity", "layer_io_similarity", "stream_norm",
                     "first_contribution", "depth_factor"):  # fmt: skip
            found[name] = [getattr(self, name)(i) for i in range(count)]
        found["first_token_by_head"] = [[self.received(i, h) for h in range(4)] for i in range(count)]
        found["top_importance"] = [sorted(self.importance(i), reverse=True)[:10] for i in range(count)]
        found["value_spectrum"] = [self.value_spectrum(i) for i in range(count)]
        pairs = [[self.similarities(i, j) for j in range(count)] for i in range(count)]
        for k, name in enumerate(("map_similarity", "map_similarity_per_head", "map_similarity_without_first")):
            found[name] = [[pair[k] for pair in row] for row in pairs]
        return {name: np.array(value) for name, value in found.items()}

    def importance(self, i):
        size = self.maps[i].shape[1]
        a = [sum(float(self.maps[i][h, r, j]) for h in range(4) for r in range(size)) for j in range(size)]
        return [x / sum(a) for x in a]

    def first_token_share(self, i):
        return self.importance(i)[0]

    def entropy(self, i):
        return -sum(a * math.log(a) for a in self.importance(i))

    def received(self, i, head):
        return sum(float(row[0]) for row in self.maps[i][head]) / len(self.maps[i][head])

    def sink_rate(self, i):
        return sum(self.received(i, head) > 0.3 for head in range(4)) / 4

    def value_norms(self, i):
        v = self.values[i]
        return [
            np.mean([math.sqrt(sum(float(c) ** 2 for c in v[h, t])) for h in range(len(v))]) for t in range(v.shape[1])
        ]

    def value_norm_ratio(self, i):
        norms = self.value_norms(i)
        return norms[0] / np.median(norms[1:])

    def first_contribution(self, i):
        maps, v = self.maps[i], self.values[i]
        sums = [0.0] * maps.shape[1]
        for h in range(len(maps)):
            for j in range(maps.shape[1]):
                sums[j] += sum(float(a) for a in maps[h, :, j]) * float(v[h * len(v) // len(maps), j].norm())
        return sums[0] / sum(sums)

    def norms(self, i):
        return [math.sqrt(sum(float(c) ** 2 for c in token)) for token in self.hidden[i]]

    def hidden_norm_ratio(self, i):
        return self.norms(i)[0] / np.median(self.norms(i)[1:])

    def stream_norm(self, i):
        return np.mean(self.norms(i))

    def mlp_l1_l2(self, i):
        u = self.kept["mlp", i][0].tolist()
        return sum(abs(c) for c in u) / math.sqrt(sum(c * c for c in u))

    def token_similarity(self, i):
        h = self.hidden[i]
        return np.mean([cosine(h[a], h[b]) for a in range(len(h)) for b in range(len(h)) if a != b])

    def attention_io_similarity(self, i):
        return np.mean([cosine(x, x + u) for x, u in zip(self.hidden[i], self.kept["attention", i], strict=True)])

    def layer_io_similarity(self, i):
        return np.mean([cosine(x, y) for x, y in zip(self.hidden[i], self.after[i], strict=True)])

    def depth_factor(self, i):
        pairs = zip(self.hidden[i].tolist(), self.after[i].tolist(), strict=True)
        return np.mean([math.dist(x, y) / math.hypot(*x) for x, y in pairs])

    def value_spectrum(self, i):
        v = self.values[i]
        flat = torch.cat([v[h] for h in range(len(v))], dim=1)
        covariance = sum(torch.outer(row, row) for row in flat) / len(flat)
        return np.linalg.eigvalsh(covariance.numpy())[::-1]

    def similarities(self, i, j):
        a, b = self.maps[i].mean(0), self.maps[j].mean(0)
        heads = np.mean([cosine(self.maps[i][h], self.maps[j][h]) for h in range(4)])
        return cosine(a, b), heads, cosine(a[:, 1:], b[:, 1:])


def cosine(a, b):
    a, b = a.flatten().tolist(), b.flatten().tolist()
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


@pytest.mark.parametrize("family", FAMILIES)
def test_measures_equal_naive_loops(family):
    implementation = "eager" if family == "gemma2" else "sdpa"
    model, ids = tiny(family, implementation, num_hidden_layers=3), tokens(batch=2, length=19)
    diagnosis = crosslayer.diagnose(model, ids)
    measures, loops = diagnosis.measures, [Naive(model, sequence) for sequence in ids]
    naive = [loop.expected() for loop in loops]
    for name in naive[0]:
        expected = np.stack([sequence[name] for sequence in naive])
        measured = getattr(measures, name)
        assert np.abs(measured.array() - expected.mean(axis=0)).max() < TOLERANCE * max(1.0, np.abs(expected).max()), (
            name
        )
        half = stats.t.ppf(0.975, 1) * expected.std(axis=0, ddof=1) / math.sqrt(2)
        width = measured.interval()
        # half-widths come from differences, which lose a few digits
        assert np.abs(width[..., 1] - width[..., 0] - 2 * half).max() < 1e-8 * max(1.0, np.abs(expected).max()), name
    others = {"mlp_l1_l2_others", "key_norm_ratio", "query_key_cosine", "query_key_cosine_others"}
    assert set(naive[0]) | others == set(type(measures).model_fields), "Naive.expected needs a loop for each measure"
    for bins, norms in (
        (diagnosis.value_norms_by_position, "value_norms"),
        (diagnosis.hidden_norms_by_position, "norms"),
    ):
        expected = np.mean([[getattr(loop, norms)(i) for i in range(3)] for loop in loops], axis=0)  # (L, T)
        assert bins.edges == [*range(19)] and np.abs(np.array(bins.mean) - expected).max() < TOLERANCE, norms


def random_call(size, heads=2, kv_heads=1, layer=0, mask=None, **options):
    generator = torch.Generator().manual_seed(layer)
    q = torch.randn(1, heads, size, 8, dtype=torch.float64, generator=generator)
    k = torch.randn(1, kv_heads, size, 8, dtype=torch.float64, generator=generator)
    return AttentionCall(torch.nn.Module(), layer, q, k, k, mask, {"is_causal": True, **options})


def reference(call, blocked, bias=None):
    """Head-averaged map of one call with full S × S scores."""
    k = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
    scores = call.query @ k.transpose(-1, -2) * call.scaling
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(blocked, -math.inf)
    if call.sinks is not None:
        extra = call.sinks.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        return torch.cat([scores, extra], -1).softmax(-1)[0, ..., :-1].mean(0)
    return scores.softmax(-1)[0].mean(0)


@pytest.mark.parametrize("size", [300, 257])  # more than one block of 256 rows, the last one ragged
def test_blocks_of_rows_join_up(size):
    calls = [random_call(size, layer=i) for i in range(3)]
    future = torch.ones(size, size).triu(1).bool()
    maps = torch.stack([reference(call, future) for call in calls])
    sums = map_sums(calls)
    assert (sums.columns - maps.sum(1)).abs().max() < 1e-10 and (sums.last - maps[:, -1]).abs().max() < 1e-10
    assert (sums.diagonal_by_head.mean(1) - maps.diagonal(dim1=1, dim2=2)).abs().max() < 1e-10
    assert (sums.gram - torch.einsum("aij,bij->ab", maps, maps)).abs().max() < 1e-10
    rest = maps[..., 1:]
    assert (sums.gram_without_first - torch.einsum("aij,bij->ab", rest, rest)).abs().max() < 1e-10


def test_every_kind_of_mask_gives_the_same_maps():
    size = 40
    rows, columns = torch.arange(size)[:, None], torch.arange(size)
    blocked = (columns > rows) | (columns <= rows - 8)
    boolean = (~blocked)[None, None]
    added = torch.zeros(1, 1, size, size, dtype=torch.float64).masked_fill(blocked, torch.finfo(torch.float64).min)
    infinite = torch.zeros(1, 1, size, size, dtype=torch.float64).masked_fill(blocked, -math.inf)
    calls = [random_call(size, mask=mask) for mask in (boolean, added, infinite)] + [
        random_call(size, sliding_window=8)
    ]
    columns = map_sums(calls).columns
    expected = reference(calls[0], blocked).sum(0)
    assert (columns - expected).abs().max() < 1e-12


def test_learned_sinks_and_position_bias():
    size = 12
    future = torch.ones(size, size).triu(1).bool()
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    bias = torch.randn(1, 2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    calls = [random_call(size, s_aux=sinks), random_call(size, position_bias=bias)]
    sums = map_sums(calls)
    assert (sums.columns[0] - reference(calls[0], future).sum(0)).abs().max() < 1e-12
    assert (sums.columns[1] - reference(calls[1], future, bias).sum(0)).abs().max() < 1e-12


def test_layers_with_different_numbers_of_heads():
    calls = [random_call(20, heads=2, layer=0), random_call(20, heads=4, kv_heads=2, layer=1)]
    future = torch.ones(20, 20).triu(1).bool()
    sums = map_sums(calls)
    for i, call in enumerate(calls):
        assert (sums.columns[i] - reference(call, future).sum(0)).abs().max() < 1e-12
    for by_head in (sums.columns_by_head, sums.diagonal_by_head):
        assert by_head[0].isnan().all(dim=-1).tolist() == [False, False, True, True] and not by_head[1].isnan().any()
    heads = m.gram_cosine(sums.gram_by_head)
    assert heads[2:, 0, 1].isnan().all() and not heads[:2].isnan().any()


def test_no_tensor_of_the_size_of_a_map_is_made():
    from torch.utils._python_dispatch import TorchDispatchMode

    size, largest = 1536, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes() // result.element_size())
            return result

    model = tiny("llama", dtype=torch.float32, max_position_embeddings=size, num_hidden_layers=2)
    ids = tokens(batch=1, length=size)
    with Watch():
        crosslayer.diagnose(model, ids)
    assert size * 64 < largest < size * size  # the (2, 256, S) buffer is the largest


def test_spectrum_with_fewer_tokens_than_dimensions():
    value = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = value.transpose(0, 1).reshape(5, 16)
    expected = torch.linalg.eigvalsh(flat.T @ flat / 5).flip(0)
    assert (m.value_spectrum(value) - expected).abs().max() < 1e-12


def test_interval_of_one_sequence_is_none_and_gaps_stay():
    single = measure(np.array([[1.0, np.nan]]))
    assert single.model_dump() == {"mean": [1.0, None], "ci95": None, "n": 1, "over": "sequences"}
    assert single.interval() is None
    two = measure(np.array([[1.0, np.nan], [3.0, np.nan]]))
    assert two.ci95 is not None and two.mean == [2.0, None] and two.ci95[1] == [None, None]
    assert two.ci95[0] == pytest.approx([2 - 12.706204736432095, 2 + 12.706204736432095])


def test_importance_by_position_keeps_the_first_token_alone_and_all_mass():
    shares = np.random.default_rng(0).dirichlet(np.ones(1000), size=(2, 3))
    bins = by_position(shares)
    widths = np.diff([*bins.edges, bins.length])
    assert bins.edges[0] == 0 and widths[0] == 1
    assert np.allclose((np.array(bins.mean) * widths).sum(axis=-1), 1)


def test_sequences_do_not_influence_each_other():
    model, ids = tiny("llama"), tokens(batch=3)
    together = crosslayer.diagnose(model, ids).measures
    alone = [crosslayer.diagnose(model, sequence[None]).measures for sequence in ids]
    for name, measured in together:
        assert measured == measure(np.stack([getattr(measures, name).array() for measures in alone])), name


def test_the_interval_is_scipys():
    sample = np.random.default_rng(0).normal(size=(5, 3))
    low, high = stats.t.interval(0.95, 4, loc=sample.mean(axis=0), scale=stats.sem(sample, axis=0))
    assert np.allclose(measure(sample).interval(), np.stack([low, high], axis=-1), rtol=1e-12)
    assert measure(np.ones((2, 1))).interval().tolist() == [[1.0, 1.0]]  # no spread, no width


def test_calls_have_rotated_queries():
    model, ids, calls = tiny("llama"), tokens(batch=1), []
    with torch.no_grad(), visited(model, calls.append):
        model(ids)
    attention, x = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    plain = attention.k_proj(x).view(1, ids.shape[1], 2, 8).transpose(1, 2)
    assert torch.allclose(calls[0].key[:, :, 0], plain[:, :, 0])  # position 0 is not rotated
    assert not torch.allclose(calls[0].key[:, :, 5], plain[:, :, 5])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_attention_times_the_norms_of_values_by_loops(heads, kv_heads):
    """The waiver's Eq. 5: the norm of a value that is weighted is the weight times its norm."""
    calls = [random_call(20, heads=heads, kv_heads=kv_heads, layer=layer) for layer in range(2)]
    norms = [call.value[0].norm(dim=-1) for call in calls]
    sums = map_sums(calls, norms)
    for layer, call in enumerate(calls):
        first = every = 0.0
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = call.query[0, head] @ call.key[0, kv_head].T * call.scaling
            weights = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf).softmax(-1)
            for row in range(20):
                for column in range(row + 1):
                    part = float((weights[row, column] * call.value[0, kv_head, column]).norm())
                    every += part
                    first += part if column == 0 else 0.0
        assert sums.contribution[layer].tolist() == pytest.approx([first, every], rel=1e-9)
    assert not map_sums(calls).contribution.any()


def test_angles_of_queries_and_keys_by_loops():
    call = random_call(9, heads=4, kv_heads=2)
    first, others = m.cosines_with_queries(call.query[0], call.key[0])
    with_first, with_others = [], []
    for head in range(4):
        key = call.key[0, head // 2]
        for row in range(1, 9):
            cosines = [float(functional.cosine_similarity(call.query[0, head, row], key[i], dim=0)) for i in range(row)]
            with_first.append(cosines[0])
            with_others += [sum(cosines[1:]) / len(cosines[1:])] if row > 1 else []
    assert first.item() == pytest.approx(sum(with_first) / len(with_first), rel=1e-9)
    assert others.item() == pytest.approx(sum(with_others) / len(with_others), rel=1e-9)
