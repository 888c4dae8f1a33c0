"""Watch the residual stream: what enters a layer, what attention and the MLP add to it, what leaves.

Works from the order in which a layer calls its children, with no adapter per architecture. In
    x' = x + Attn(x);  y = x' + MLP(x')
the stream after attention is the first tensor that a child receives after the attention block and that no child of the
layer has produced. Where it never exists (parallel blocks, BERT's post-norm) it is x plus what attention produced.

Shapes: T tokens, C hidden. Sequences go singly.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.probe.intercept import attention_layers, layer_stack


@dataclass(frozen=True)
class LayerStream:
    """The residual stream around a layer; each (T, C), None where the layer has no such sublayer.

    `attention` and `mlp` are the modules whose outputs the layer adds to the stream.
    """

    layer: int
    before: Tensor
    after_attention: Tensor | None
    mlp_update: Tensor | None
    after: Tensor
    attention: nn.Module | None
    mlp: nn.Module | None


@contextmanager
def streams(model: PreTrainedModel, see: Callable[[LayerStream], None]) -> Iterator[None]:
    """Show the stream around every layer to `see`, as soon as the layer is done; hooks are removed on exit."""
    stack, with_attention = layer_stack(model), set(attention_layers(model.config))
    with ExitStack() as hooks:
        for index, layer in enumerate(stack):
            _LayerWatch(index, layer, index in with_attention, see).hook(hooks)
        yield


class _LayerWatch:
    """Hooks of a layer; holds tensors only while the layer runs."""

    def __init__(self, index: int, layer: nn.Module, has_attention: bool, see: Callable[[LayerStream], None]):
        self.index, self.layer, self.see = index, layer, see
        children = list(layer.children())
        self.attention = next((c for c in children if has_attention and _is_attention(c)), None)
        self.attention_out = None if self.attention is None else _producer(self.attention)
        self.blocks = {c: _last_linear(c) for c in children if c is not self.attention and _matrices(c)}
        self._clear()

    def hook(self, hooks: ExitStack) -> None:
        """Register all hooks; `hooks` removes them."""
        handles = [
            self.layer.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.layer.register_forward_hook(self._leave, prepend=True),  # before anyone changes the output
        ]
        for child in self.layer.children():
            handles.append(child.register_forward_pre_hook(self._child_in, with_kwargs=True))
            handles.append(child.register_forward_hook(self._child_out, with_kwargs=True))
        if self.attention_out is not None:
            handles.append(self.attention_out.register_forward_hook(self._keep_attention))
        for linear in self.blocks.values():
            if linear is not None:
                handles.append(linear.register_forward_hook(self._keep_linear))
        for handle in handles:
            hooks.callback(handle.remove)

    def _clear(self) -> None:
        self.before: Tensor | None = None
        self.attention_update: Tensor | None = None
        self.after_attention: Tensor | None = None
        self.known: list[Tensor] = []  # the layer's input and what its children produced
        self.ran: list[tuple[nn.Module, Tensor, Tensor]] = []  # block, input, output, in the order of execution
        self.linear: dict[nn.Module, Tensor] = {}  # outputs of the blocks' last linear layers

    def _enter(self, _, args, kwargs) -> None:
        self._clear()
        entering = _first(args, kwargs)  # (1, T, C)
        if entering.dim() != 3 or entering.shape[0] != 1:
            raise ValueError(
                f"layer {self.index} ({type(self.layer).__name__}) receives a stream of shape {tuple(entering.shape)}; "
                "models with several residual streams cannot be diagnosed yet, and sequences go singly"
            )
        self.before, self.known = entering, [entering]

    def _child_in(self, child, args, kwargs) -> None:
        if self.attention_update is None or self.after_attention is not None or self.before is None:
            return
        received = _first(args, kwargs)
        same = any(received.data_ptr() == tensor.data_ptr() for tensor in self.known)
        if not same and received.numel() == self.before.numel():
            self.after_attention = received

    def _child_out(self, child, args, kwargs, output) -> None:
        produced, received = _tensor(output), _first(args, kwargs)
        update = self.attention_update
        if update is not None and _is_norm(child) and received.data_ptr() == update.data_ptr():
            self.attention_update = produced  # a norm on the sublayer's output (Gemma 2, OLMo 2)
        if child in self.blocks:
            self.ran.append((child, received, produced))
        self.known.append(produced)

    def _keep_attention(self, _, args, output) -> None:
        self.attention_update = _tensor(output)
        self.known.append(self.attention_update)

    def _keep_linear(self, module, args, output) -> None:
        self.linear[module] = output

    def _mlp_update(self, after: Tensor) -> tuple[nn.Module | None, Tensor | None]:
        """Return the MLP and what it produced: the block that ran last, or None where several shared its input.

        A block whose output is the layer's own has added the residual (BERT): then its last linear layer counts.
        """
        if not self.ran:
            return None, None
        block, received, produced = self.ran[-1]
        if any(other.data_ptr() == received.data_ptr() for _, other, _ in self.ran[:-1]):
            return None, None
        if produced.data_ptr() != after.data_ptr():
            return block, produced
        linear = self.blocks[block]
        return linear, None if linear is None else self.linear.get(linear)

    def _leave(self, _, args, output) -> None:
        assert self.before is not None
        middle, after = self.after_attention, _tensor(output)
        if middle is None and self.attention_update is not None:
            middle = self.before + self.attention_update.view_as(self.before)
        mlp, update = self._mlp_update(after)
        flat = [None if x is None else x.reshape(-1, x.shape[-1]) for x in (self.before, middle, update, after)]
        assert flat[0] is not None and flat[3] is not None
        self.see(LayerStream(self.index, flat[0], flat[1], flat[2], flat[3], self.attention_out, mlp))
        self._clear()


def _first(args: tuple, kwargs: dict) -> Tensor:
    """Return the first tensor that a module receives: its input."""
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))


def _tensor(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _is_attention(module: nn.Module) -> bool:
    return any("Attention" in type(m).__name__ for m in module.modules())


def _matrices(module: nn.Module) -> bool:
    return any(p.dim() > 1 for p in module.parameters())


def _is_norm(module: nn.Module) -> bool:
    return not _matrices(module) and any(True for _ in module.parameters())


def _producer(block: nn.Module) -> nn.Module:
    """Return the module whose output is what attention adds to the stream.

    That is the block itself, unless it also adds the residual and normalises (BERT): then its last linear layer.
    """
    if not any(isinstance(m, nn.LayerNorm) for m in block.modules()):
        return block
    return _last_linear(block) or block


def _last_linear(module: nn.Module) -> nn.Module | None:
    """Return the last linear layer of a block; with an adapter around it (PEFT's `base_layer`) it counts as a whole."""
    if isinstance(module, nn.Linear) or "base_layer" in dict(module.named_children()):
        return module
    for child in reversed(list(module.children())):
        linear = _last_linear(child)
        if linear is not None:
            return linear
    return None
