"""Watch the residual stream: what enters a layer, what attention and the MLP add to it, what leaves.

Works from the order in which a layer calls its children, with no adapter per architecture. In
    x' = x + Attn(x);  y = x' + MLP(x')
the stream after attention is the first tensor that a child receives after the attention block and that no child of the
layer has produced. Where it never exists (parallel blocks, BERT's post-norm) it is x plus what attention produced.

Several residual streams (hyper-connections, alternating updates) are told by their shape. Where they are not written
between attention and MLP (Gemma 3n), what both sublayers read stands for what attention changes.

With attention over depth a sublayer does not read what its layer receives. Then x is what the layer's first sublayer
reads, x' what its second, y what the next layer's first reads; the last layer has no y.

Shapes: N streams, T tokens, C hidden. Sequences go singly.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.method import Compensation, Residual
from crosslayer.probe.measures import working
from crosslayer.probe.model import attention_layers, layer_stack


@dataclass(frozen=True)
class LayerStream:
    """The residual around a layer; None where the layer has no such sublayer.

    Attributes:
        layer: its index.
        entering: the streams before the layer, (N, T, C).
        leaving: after it, (N, T, C); None for the last layer of a model with attention over depth.
        around_attention: before and after attention, each (N, T, C), or (1, T, C) where the streams are not written.
        mlp_update: what the MLP adds, with a norm behind it, (T, C).
        attention: the module whose output attention adds to the stream.
        mlp: the module whose output the MLP adds to the stream.
        over_depth: whether the layer reads something else than it receives.
        updates: what attention and the MLP add, as they or norms and convolutions behind them produced it, (…, T, C).
        reads: what they read, before a norm, (…, T, C).
        between: the streams after attention, (N, T, C); None where they are not written there.
        others: what else the layer adds or reads, by name, (…, T, C): before its MLP, and behind it.
        linear_update: what linear attention adds in a layer without softmax attention, (…, T, C).
    """

    layer: int
    entering: Tensor
    leaving: Tensor | None
    around_attention: tuple[Tensor, Tensor] | None
    mlp_update: Tensor | None
    attention: nn.Module | None
    mlp: nn.Module | None
    over_depth: bool = False
    updates: tuple[Tensor | None, Tensor | None] = (None, None)
    reads: tuple[Tensor | None, Tensor | None] = (None, None)
    between: Tensor | None = None
    others: tuple[dict[str, Tensor], dict[str, Tensor]] = field(default_factory=lambda: ({}, {}))
    linear_update: Tensor | None = None

    @property
    def before(self) -> Tensor:
        """The mean of the streams before the layer, (T, C)."""
        return mean_stream(self.entering)

    @property
    def after_attention(self) -> Tensor | None:
        """Their mean after attention, (T, C)."""
        return None if self.around_attention is None else mean_stream(self.around_attention[1])

    @property
    def after(self) -> Tensor | None:
        """Their mean after the layer, (T, C)."""
        return None if self.leaving is None else mean_stream(self.leaving)


def mean_stream(streams: Tensor) -> Tensor:
    """Return the mean of residual streams, (N, T, C) → (T, C); a single stream as it is."""
    return streams[0] if len(streams) == 1 else working(streams).mean(dim=0)


@contextmanager
def streams(model: PreTrainedModel, see: Callable[[LayerStream], None]) -> Iterator[None]:
    """Show the stream around every layer to `see`, as soon as the next layer reads; hooks are removed on exit."""
    stack, with_attention = layer_stack(model), set(attention_layers(model.config))
    width = model.config.get_text_config().hidden_size
    turns = _Turns(see)
    parent = next(module for module in model.modules() if stack in set(module.children()))
    with ExitStack() as hooks:
        hooks.callback(parent.register_forward_pre_hook(turns.start).remove)
        hooks.callback(parent.register_forward_hook(turns.finish).remove)
        for index, layer in enumerate(stack):
            _LayerWatch(index, layer, index in with_attention, turns, width).hook(hooks)
        yield
        turns.finish()


class _Run(NamedTuple):
    """A block that ran: what it received, produced and adds, and whether attention had run before it.

    It adds what it produced, or what a norm (Gemma 2, OLMo 2) or a convolution (Inkling 2) makes of that.
    """

    block: nn.Module
    received: Tensor
    produced: Tensor
    added: Tensor
    behind_attention: bool


class _Turns:
    """Holds what a layer showed until it is known what the next one reads."""

    def __init__(self, see: Callable[[LayerStream], None]):
        self.see = see
        self.waiting: LayerStream | None = None

    def start(self, *_: Any) -> None:
        self.waiting = None

    def finish(self, *_: Any) -> None:
        """Show the last layer; what reads behind it is not known to be of its kind, where layers read over depth."""
        if self.waiting is not None and self.waiting.over_depth:
            self.waiting = replace(self.waiting, leaving=None)
        self.next_reads(None)

    def next_reads(self, read: Tensor | None) -> None:
        """Show the layer that waits; `read` (1, T, C) replaces what it left, unless it is None."""
        stream, self.waiting = self.waiting, None
        if stream is not None:
            self.see(stream if read is None else replace(stream, leaving=read))


class _LayerWatch:
    """Hooks of a layer; holds tensors only while the layer runs."""

    def __init__(self, index: int, layer: nn.Module, has_attention: bool, turns: _Turns, width: int):
        self.index, self.layer, self.turns, self.width = index, layer, turns, width
        children = list(layer.children())
        named = [c for c in children if any("Attention" in type(m).__name__ for m in c.modules()) and has_attention]
        self.attention = max(named, key=_size, default=None)  # attention over depth has far fewer weights
        self.attention_out = self.attention  # whose output attention adds to the stream
        inner = [] if self.attention is None or any(map(_is_norm, children)) else self.attention.modules()
        if self.attention is not None and any(isinstance(module, nn.LayerNorm) for module in inner):
            self.attention_out = _last_linear(self.attention) or self.attention  # it adds the residual too (BERT)
        blocks = [c for c in children if c is not self.attention and not isinstance(c, Compensation)]
        with_matrices = [block for block in blocks if any(p.dim() > 1 for p in block.parameters())]
        self.blocks = {block: _last_linear(block) for block in with_matrices}
        self.names = {child: name for name, child in layer.named_children()}
        sizes = [_size(module) for module in (self.attention, *with_matrices) if module is not None]
        self.small = max(sizes, default=0) / 8  # what is smaller is neither attention nor MLP: a convolution, a gate
        self._clear()

    def hook(self, hooks: ExitStack) -> None:
        """Register all hooks; `hooks` removes them."""
        handles = [
            self.layer.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.layer.register_forward_hook(self._leave, prepend=True),  # before anyone changes the output
        ]
        for child in self.layer.children():
            if isinstance(child, Residual):  # it reads for the others
                continue
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
        self.received: Tensor | None = None  # by the layer
        self.elements = 0  # of one of the streams that the layer received
        self.read: Tensor | None = None  # (…, T, C) by the first child that receives a single stream
        self.attention_update: Tensor | None = None
        self.after_attention: Tensor | None = None
        self.read_after: Tensor | None = None  # (…, T, C), of several streams: what is read behind attention
        self.linear_update: Tensor | None = None  # of linear attention, where the layer has no other
        self.known: list[Tensor] = []  # the layer's input and what its children produced
        self.mixed: list[Tensor] = []  # what children produced out of more than one stream
        self.ran: list[_Run] = []  # the blocks, in the order of execution
        self.linear: dict[nn.Module, Tensor] = {}  # outputs of the blocks' last linear layers

    def _enter(self, _, args, kwargs) -> None:
        self._clear()
        entering = _first(args, kwargs)
        if not (entering.dim() == 3 and entering.shape[0] == 1 or entering.dim() == 4 and 1 in entering.shape[:2]):
            raise ValueError(
                f"layer {self.index} ({type(self.layer).__name__}) must receive a single sequence, with {self.width} "
                f"channels or several streams of them, got the shape {tuple(entering.shape)}"
            )
        self.received, self.known = entering, [entering]
        streams = split(entering, self.width)
        self.elements = streams[0].numel()
        if len(streams) > 1:
            self.turns.next_reads(None)

    def _child_in(self, child, args, kwargs) -> None:
        if self.received is None:
            return
        received, alone = _first(args, kwargs), len(self._wide(args, kwargs)) <= 1
        if not alone:  # a child that mixes sources, which reads for others
            return
        if self.read is None and received.numel() == self.elements:
            self.read = received  # the layer before it has left that, or its own output
            if received.numel() == self.received.numel():
                self.turns.next_reads(split(received, self.width) if self._over_depth else None)
        if self.attention_update is None and self.linear_update is None:
            return
        is_new = not _among(received, self.known)
        if self.after_attention is not None:
            several = self.received.numel() > self.elements
            if several and is_new and self.read_after is None and received.numel() == self.elements:
                self.read_after = received  # out of the streams, for the MLP
            return
        if (is_new or _among(received, self.mixed)) and received.numel() == self.received.numel():
            self.after_attention = received
        elif is_new and self.read_after is None and received.numel() == self.elements:
            self.read_after = received

    @property
    def _over_depth(self) -> bool:
        """Whether the layer's only stream is not what its first sublayer reads."""
        assert self.received is not None
        if self.read is None or self.read.numel() != self.received.numel():
            return False
        return not _among(self.read, [self.received])

    def _wide(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """Return those of a child's inputs that are streams, or several of them, of all tokens."""
        assert self.received is not None
        tokens = split(self.received, self.width).shape[1]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 2]
        return [tensor for tensor in tensors if tensor.shape[-1] == self.width and tensor.shape[1] == tokens]

    def _child_out(self, child, args, kwargs, output) -> None:
        if self.received is None:
            return
        produced, received = _tensor(output), _first(args, kwargs)
        update, is_behind = self.attention_update, False
        if _is_norm(child) or (_size(child) < self.small and produced.numel() == received.numel()):
            if update is not None and received.data_ptr() == update.data_ptr():
                self.attention_update, is_behind = produced, True
            for number, run in enumerate(self.ran):
                if received.data_ptr() == run.added.data_ptr():
                    self.ran[number], is_behind = run._replace(added=produced), True
            if self.linear_update is not None and received.data_ptr() == self.linear_update.data_ptr():
                self.linear_update = produced
        if child in self.blocks and not is_behind and len(self._wide(args, kwargs)) <= 1:
            self.ran.append(_Run(child, received, produced, produced, update is not None))
            is_mixer = self.attention is None and received.numel() == produced.numel() == self.elements
            if is_mixer and self.linear_update is None:
                self.linear_update = produced  # of the MLP, if it is the only block
        self.known.append(produced)
        if child is not self.attention and len(self._wide(args, kwargs)) > 1:
            self.mixed.append(produced)

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
        ran = [run for run in self.ran if run.behind_attention] or self.ran
        least = max(_size(run.block) for run in ran) / 8  # what is smaller is no MLP: a convolution, a gate
        last = [run for run in ran if _size(run.block) >= least][-1]
        others = [run.received for run in self.ran if run is not last and _size(run.block) >= least]
        if _among(last.received, others):
            return None, None
        if not _among(last.produced, [after]):
            return last.block, last.added
        linear = self.blocks[last.block]
        return linear, None if linear is None else self.linear.get(linear)

    def _around_attention(self, entering: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the streams before and after attention, or what is read before and after it."""
        if self.attention_update is None:
            return None
        if self.after_attention is not None:
            return entering, split(self.after_attention, self.width)
        if len(entering) == 1:
            return entering, entering + self.attention_update.view_as(entering)
        if self.read is None or self.read_after is None:
            return None
        return split(self.read, self.width), split(self.read_after, self.width)

    def _leave(self, _, args, output) -> None:
        assert self.received is not None
        after = _tensor(output)
        entering, over_depth = self.received, self._over_depth
        if over_depth:
            assert self.read is not None
            entering = self.read
        elif self.read is None:
            self.turns.next_reads(None)
        entering = split(entering, self.width)
        mlp, update = self._mlp_update(after)
        linear = self.linear_update
        if linear is not None and update is not None and _among(linear, [update]):
            linear = None  # the MLP is the layer's only block
        if self.attention_update is None and linear is None:
            read_by_mlp = self.read
        else:
            several = self.received.numel() > self.elements
            read_by_mlp = self.read_after if several or self.after_attention is None else self.after_attention
        self.turns.waiting = LayerStream(
            self.index,
            entering,
            split(after, self.width),
            self._around_attention(entering),
            None if update is None else update.reshape(-1, update.shape[-1]),
            self.attention_out,
            mlp,
            over_depth,
            (self.attention_update, update),
            (self.read, read_by_mlp),
            None if self.after_attention is None else split(self.after_attention, self.width),
            self._others(mlp, linear),
            linear,
        )
        self._clear()

    def _others(self, mlp: nn.Module | None, linear: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what blocks other than attention and the MLP produced, before the MLP and behind it, by name."""
        before, behind = {}, {}
        are_mlp = [mlp is not None and mlp in (run.block, self.blocks[run.block]) for run in self.ran]
        last = are_mlp.index(True) if True in are_mlp else len(are_mlp)
        for number, run in enumerate(self.ran):
            is_own = number == last or (linear is not None and run.added.data_ptr() == linear.data_ptr())
            if not is_own and run.added.numel() == self.elements and run.added.shape[-1] == self.width:
                (before if number < last else behind)[self.names[run.block]] = run.added
        return before, behind


def split(stream: Tensor, width: int) -> Tensor:
    """Return the streams (N, T, C) that a layer hands on for a sequence, in whichever form it does so.

    (1, T, C), (1, T, N, C), (N, 1, T, C) or (1, T, N·C); `width` is C.
    """
    if stream.dim() == 4:
        return stream[:, 0] if stream.shape[1] == 1 else stream[0].transpose(0, 1)
    channels = stream.shape[-1]
    if channels > width and channels % width == 0:
        return stream[0].unflatten(-1, (-1, width)).transpose(0, 1)  # (T, N·C) → (N, T, C)
    return stream.reshape(1, -1, channels)


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor.data_ptr() == other.data_ptr() for other in others)


def _first(args: tuple, kwargs: dict) -> Tensor:
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))


def _tensor(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_norm(module: nn.Module) -> bool:
    dimensions = [parameter.dim() for parameter in module.parameters()]
    return bool(dimensions) and max(dimensions) <= 1


def _last_linear(module: nn.Module) -> nn.Module | None:
    """Return the last linear layer of a block; with an adapter around it (PEFT's `base_layer`) it counts as a whole."""
    if isinstance(module, nn.Linear) or "base_layer" in dict(module.named_children()):
        return module
    for child in reversed(list(module.children())):
        linear = _last_linear(child)
        if linear is not None:
            return linear
    return None
