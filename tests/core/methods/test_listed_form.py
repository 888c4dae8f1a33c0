"""Attention over depth: the fast form equals the listed one in every circumstance."""

import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from crosslayer.core.depth_attention import depth_attention, keep, listed, operators, plain
from crosslayer.core.sources import Sources
from crosslayer.testing.tiny import build, config_of
from tests.helpers.tiny import tokens


def readers(form, seed=0, dtype=torch.float64):
    """Read seven times; each read but the last makes the next source. Return the loss and its leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    leaf = draw(2, 50, 16).requires_grad_()
    maps, directions = [draw(16, 16) / 4 for _ in range(6)], [draw(16).requires_grad_() for _ in range(7)]

    def stored(source, earlier):
        return earlier.with_newest(source) if form is listed else keep(source, earlier, 7)

    sources = stored(leaf, Sources())
    for matrix, direction in zip(maps, directions[:-1], strict=True):
        result = form(sources, direction, 1e-6)
        sources = stored(torch.tanh(result @ matrix), sources)
    return form(sources, directions[-1], 1e-6).square().sum(), (leaf, *directions)


def source_nodes(loss):
    """Return the nodes of autograd's graph that collect the terms of sources' gradients."""
    waiting, nodes = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, operators._Source._backward_cls):
            nodes.add(node)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return nodes


def agree(results, expected, tolerance=1e-12):
    assert len(results) == len(expected) > 0
    for result, other in zip(results, expected, strict=True):
        assert (result - other).abs().max() <= tolerance * other.abs().max().clamp(min=1)


def test_gradients_equal_the_listed_form():
    (loss, leaves), (expected, others) = readers(depth_attention), readers(listed)
    assert abs(loss - expected) < 1e-12 * abs(expected)
    agree(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, others))


def test_second_derivatives_equal_the_listed_form():
    results = []
    for form in (depth_attention, listed):
        loss, leaves = readers(form)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves))
    agree(*results, tolerance=1e-10)


def test_a_backward_pass_may_be_repeated_and_broken_off():
    loss, leaves = readers(depth_attention)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    # of the last readers alone: the sources below them do not come to build their gradients
    agree(torch.autograd.grad(loss, leaves[5:], retain_graph=True), expected[5:], 0)

    def fail(_):
        raise RuntimeError("broken off")

    handle = leaves[2].register_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        loss.backward(retain_graph=True)
    handle.remove()
    agree(torch.autograd.grad(loss, leaves, retain_graph=True), expected, 0)
    nodes = source_nodes(loss)
    assert len(nodes) == 7 and not any(node.terms for node in nodes)


def test_two_forward_passes_at_once_do_not_mix():
    """One is abandoned, two are open together, and the second goes backward first."""
    model, ids, other = build(config_of(["attnres"])).train(), tokens(seed=1), tokens(seed=2)

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = [gradients(model(x, labels=x, use_cache=False).loss) for x in (ids, other)]
    model(ids, use_cache=False)
    one, two = (model(x, labels=x, use_cache=False).loss for x in (ids, other))
    agree(gradients(two), expected[1], 0)
    agree(gradients(one), expected[0], 0)


def test_nothing_of_a_forward_pass_stays():
    model, ids = build(config_of(["attnres"])).train(), tokens()
    seen = []

    def watch(module, args, output):
        sources = output[1]["attnres.sources"]
        seen.extend(weakref.ref(source) for source in sources)
        seen.append(weakref.ref(sources.bank))

    handle = model.model.layers[-1].register_forward_hook(watch)
    model(ids, labels=ids, use_cache=False).loss.backward()
    model(ids, labels=ids, use_cache=False)
    handle.remove()
    gc.collect()
    assert len(seen) == 26 and not any(reference() is not None for reference in seen)


@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_is_the_same_by_either_form(block, checkpointing, monkeypatch):
    results = []
    for by_definition in (False, True):
        monkeypatch.setattr(operators, "uses_definition", lambda by_definition=by_definition: by_definition)
        model, ids = build(config_of([{"name": "attnres", "block": block}])).train(), tokens()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    agree(*results)


@pytest.mark.parametrize("wrapped", [[1], [2], [0, 3, 4], [0, 1, 2, 3, 4]], ids=str)
def test_a_source_that_is_wrapped_on_the_way_gets_its_gradient(wrapped):
    """By a copy here: its node in autograd's graph is no longer that of `keep`."""
    leaf = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    directions = torch.randn(5, 8, dtype=torch.float64)

    def gradient(wrapped):
        sources, results = Sources(), []
        for number, direction in enumerate(directions):
            sources = keep(leaf * (number + 1), sources, 5)
            if number in wrapped:
                sources = Sources([*sources[:-1], sources[-1].clone()], sources.bank)
            results.append(depth_attention(sources, direction, 1e-6))
        return torch.autograd.grad(sum(result.square().sum() for result in results), [leaf])

    agree(gradient(wrapped), gradient([]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_a_read_of_inference_equals_the_definition(dtype, tolerance, scale):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 7, 16, dtype=dtype, generator=generator) for _ in range(4)]
    for direction in torch.randn(5, 16, dtype=dtype, generator=generator) * scale:
        result, expected = (form(sources, direction, 1e-6) for form in (plain.read, listed))
        # scores of 1e4 have an absolute error that large weights' softmax passes on
        assert (result - expected).abs().max() <= tolerance * max(1, scale) * expected.abs().max()


def kept(values):
    """Return sources that were kept one after another."""
    sources = Sources()
    for value in values:
        sources = keep(value, sources, len(values))
    return sources


def leaves(count):
    return [torch.randn(2, 3, 8, requires_grad=True) for _ in range(count)]


def lengths(sources):
    """Return how many sources each operand of a reader holds."""
    return [len(operand) for operand in plain.operands_of(sources)]


def test_sources_lie_one_behind_another():
    """Sources share one tensor. Two continuations of the first four do not overwrite each other."""
    values = leaves(6)
    sources = kept(values)
    assert lengths(sources) == [6] and len(sources.bank.values) == 6
    branch = keep(leaves(1)[0], Sources(sources[:4], sources.bank), 6)
    assert lengths(branch) == [4, 1]
    assert all(torch.equal(source, value) for source, value in zip(sources, values, strict=True))


def test_a_full_bank_is_followed_by_another():
    sources = kept(leaves(19))
    assert lengths(sources) == [8, 8, 3] and len(sources.bank.values) == 3
    assert kept(leaves(1)).bank is None


def test_no_bank_under_hooks_on_saved_tensors_and_dispatch_modes():
    """Offloading and checkpointing must be able to free sources; dispatch modes must see them."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        sources = kept(leaves(5))
    assert lengths(keep(leaves(1)[0], sources, 6)) == [1] * 6
    with FlopCounterMode(display=False):
        assert lengths(kept(leaves(5))) == [1] * 5


def test_what_a_layer_returns_has_its_whole_gradient():
    """As every hook on a layer's output expects it; `keep` hides a source's gradient from its readers."""
    model, ids, outputs = build(config_of(["attnres"])).train(), tokens(), []
    for layer in model.model.layers[:-1]:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    gradients = []
    for by_definition in (False, True):
        with mock.patch.object(operators, "uses_definition", lambda by_definition=by_definition: by_definition):
            outputs.clear()
            loss = model(ids, labels=ids, use_cache=False).loss
            gradients.append(torch.autograd.grad(loss, outputs))
    agree(*gradients)


def test_selective_checkpointing():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, operator, *args, **kwargs):
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    results = []
    for selective in (False, True):
        model, ids = build(config_of(["attnres"])).train(), tokens()
        if selective:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            model.activation_checkpointing_enable({"context_fn": contexts})
        model(ids, labels=ids, use_cache=False).loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    agree(*results)


def test_partial_backward_passes_leave_nothing_behind():
    loss, (leaf, *directions) = readers(depth_attention)
    for _ in range(3):
        torch.autograd.grad(loss, directions[-1], retain_graph=True)
    nodes = source_nodes(loss)
    assert len(nodes) == 7 and not any(node.terms for node in nodes)


def test_the_bank_goes_with_the_backward_pass():
    """The loss of a step often lives until the next; what the step kept must not."""
    sources = kept(leaves(4))
    memory = StorageWeakRef(sources.bank.values.untyped_storage())
    loss = depth_attention(sources, torch.randn(8), 1e-6).sum()
    del sources
    loss.backward(retain_graph=True)
    assert not memory.expired()
    loss.backward()
    assert memory.expired() and loss.grad_fn is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own, on the first jvp
def test_transforms_of_functions_take_the_listed_form():
    sources = [torch.randn(3, 8, dtype=torch.float64) for _ in range(3)]
    direction = torch.randn(8, dtype=torch.float64)

    def result(direction):
        return depth_attention(kept(sources), direction, 1e-6).square().sum()

    by_function = torch.func.grad(result)(direction)
    direction.requires_grad_()
    agree([by_function], torch.autograd.grad(result(direction), [direction]))
    tangent = torch.func.jvp(result, (direction.detach(),), (torch.ones_like(direction),))[1]
    assert torch.allclose(tangent, by_function.sum())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_a_compiled_backward_pass():
    """Torch's compiled autograd has nodes of its own."""
    from torch._dynamo import compiled_autograd

    loss, leaves = readers(depth_attention)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    agree([leaf.grad for leaf in leaves], expected)


def test_a_batch_of_backward_passes_takes_the_listed_form():
    (loss, leaves), (expected, others) = readers(depth_attention), readers(listed)
    weights = torch.arange(3, dtype=torch.float64)
    batched = torch.autograd.grad(loss, leaves, weights, is_grads_batched=True)
    agree([gradient[2] for gradient in batched], torch.autograd.grad(expected, others, weights[2]))


def test_scores_stay_exact_under_autocast():
    direction = torch.randn(8, requires_grad=True)
    parameters = [direction, *leaves(5)]
    expected = depth_attention(kept(parameters[1:]), direction, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        result = depth_attention(kept(parameters[1:]), direction, 1e-6)
        gradients = torch.autograd.grad(result.square().sum(), parameters)
    assert torch.equal(result, expected)
    agree(gradients, torch.autograd.grad(expected.square().sum(), parameters), 0)


@pytest.mark.parametrize(("gradients", "side_by_side"), [(True, False), (False, True), (False, False)])
def test_mixed_and_narrow_types(gradients, side_by_side, monkeypatch):
    """An embedding in float32 among sources in bfloat16: results in float32, as sums of both have it."""
    monkeypatch.setattr(plain, "STACKED", 1 << 18 if side_by_side else 0)
    wide, narrow = torch.float32, torch.bfloat16
    for dtypes in ((wide, narrow, narrow, narrow, narrow), (narrow,) * 5):
        sources = [torch.randn(2, 9, 16).to(dtype).requires_grad_(gradients) for dtype in dtypes]
        direction = torch.randn(16, requires_grad=gradients)
        result = depth_attention(kept(sources), direction, 1e-6)
        expected = listed([s.float() for s in sources], direction, 1e-6)
        assert result.dtype == dtypes[0]
        tolerance = 1e-5 if dtypes[0] is wide else 2e-2
        assert torch.allclose(result.float(), expected, atol=tolerance, rtol=tolerance)
        if gradients:
            leaves = [direction, *sources]
            gradient = torch.autograd.grad(result.float().square().sum(), leaves)
            for part, other in zip(gradient, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
                assert (part.float() - other.float()).abs().max() <= 2e-2 * other.abs().max()  # bfloat16: 2⁻⁹ a term


def test_the_operators_are_sound():
    """Schemas, fakes, autograd and compilation, as torch's own check has them."""
    generator = torch.Generator().manual_seed(0)
    shape, options = (2, 5, 8), {"dtype": torch.float64, "generator": generator}
    sources = [torch.randn(*shape, **options).requires_grad_() for _ in range(3)]
    direction = torch.randn(8, **options).requires_grad_()
    names = torch.ops.crosslayer
    torch.library.opcheck(names.depth_attention.default, (sources, direction, 1e-6))
    plain_sources, plain_direction = [source.detach() for source in sources], direction.detach()
    _, scores, inverse = names.depth_attention(plain_sources, plain_direction, 1e-6)
    grad = torch.randn(*shape, **options)
    arguments = (grad, scores, inverse, plain_sources, plain_direction)
    torch.library.opcheck(names.depth_attention_backward.default, arguments)
    rows = [list(terms[:2]) for terms in names.depth_attention_backward(*arguments)[:3]]
    across = plain_sources[0].transpose(0, 1).contiguous().transpose(0, 1)  # in another order in memory
    for source, arrived in ((plain_sources[0], None), (plain_sources[0], grad), (across, grad)):
        terms = (source, [grad, grad * 2], *rows, [plain_direction] * 2, arrived)
        torch.library.opcheck(names.depth_attention_source_gradient.default, terms)
    torch.library.opcheck(names.depth_attention.default, ([across, *plain_sources], plain_direction, 1e-6))
