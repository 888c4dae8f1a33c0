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
    # the module that runs the layers, in which a pass begins and ends
    parent = next(module for module in model.modules() if stack in set(module.children()))
    with ExitStack() as hooks:
        hooks.callback(parent.register_forward_pre_hook(turns.start).remove)
        hooks.callback(parent.register_forward_hook(turns.finish).remove)
        for index, layer in enumerate(stack):
            _LayerWatch(index, layer, index in with_attention, turns, width, hooks)
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


@dataclass(eq=False)
class _Turns:
    """Holds what a layer showed until it is known what the next one reads."""

    see: Callable[[LayerStream], None]
    waiting: LayerStream | None = None

    def start(self, *_: Any) -> None:
        # a pass that ended in an error has left its last layer here
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


@dataclass(eq=False)
class _Pass:
    """What a layer has shown since it began to run.

    Tensors are told apart by the address of their memory, since models hand on views of what they read. All of them are
    kept until the layer is left: the address of a freed one may be used again.
    """

    received: Tensor  # by the layer
    width: int  # C
    elements: int  # of one of the streams that the layer received
    read: Tensor | None = None  # (…, T, C) by the first child that receives a single stream
    over_depth: bool = False  # whether the layer's only stream is not what its first sublayer reads
    attention_update: Tensor | None = None
    after_attention: Tensor | None = None
    read_after: Tensor | None = None  # (…, T, C), of several streams: what is read behind attention
    linear_update: Tensor | None = None  # of linear attention, where the layer has no other
    known: list[Tensor] = field(default_factory=list)  # the layer's input and what its children produced
    mixed: list[Tensor] = field(default_factory=list)  # what children produced out of more than one stream
    ran: list[_Run] = field(default_factory=list)  # the blocks, in the order of execution
    linear: dict[nn.Module, Tensor] = field(default_factory=dict)  # outputs of the blocks' last linear layers

    def stream_inputs(self, args: tuple, kwargs: dict) -> int:
        """Return how many of a child's inputs are streams, or several of them, of all tokens."""
        tokens = split(self.received, self.width).shape[1]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 2]
        return sum(tensor.shape[-1] == self.width and tensor.shape[1] == tokens for tensor in tensors)


class _LayerWatch:
    """Hooks of a layer, which `hooks` removes; holds tensors only while the layer runs."""

    def __init__(self, index: int, layer: nn.Module, has_attention: bool, turns: _Turns, width: int, hooks: ExitStack):
        self.index, self.layer, self.turns, self.width = index, layer, turns, width
        self.seen: _Pass | None = None
        children = list(layer.children())
        named = [c for c in children if any("Attention" in type(m).__name__ for m in c.modules()) and has_attention]
        # the largest, since attention over depth has far fewer weights
        self.attention = max(named, key=_size, default=None)

        # The module whose output attention adds to the stream. BERT's attention block adds the residual itself and has
        # a norm behind it, so that its last linear layer counts. In a layer with norms of its own, those inside
        # attention are norms of queries and keys.
        self.attention_out = self.attention
        if self.attention is not None and not any(map(_is_norm, children)):
            adds_residual = any(isinstance(module, nn.LayerNorm) for module in self.attention.modules())
            self.attention_out = (_last_linear(self.attention) if adds_residual else None) or self.attention

        # A W_c parallel to the MLP runs last, and was once measured as the MLP.
        blocks = [c for c in children if c is not self.attention and not isinstance(c, Compensation)]
        with_matrices = [block for block in blocks if any(p.dim() > 1 for p in block.parameters())]
        self.blocks = {block: _last_linear(block) for block in with_matrices}
        self.names = {child: name for name, child in layer.named_children()}
        # What is smaller is neither attention nor MLP but a convolution (Inkling 2), a gate or a projection (Gemma 4).
        self.small = max((_size(m) for m in (self.attention, *with_matrices) if m is not None), default=0) / 8

        handles = [
            layer.register_forward_pre_hook(self._enter, with_kwargs=True),
            # the first of all hooks, before anyone changes the output
            layer.register_forward_hook(self._leave, prepend=True),
        ]
        for child in children:
            if isinstance(child, Residual):  # it reads for the others
                continue
            handles.append(child.register_forward_pre_hook(self._child_in, with_kwargs=True))
            handles.append(child.register_forward_hook(self._child_out, with_kwargs=True))
        inner = [module for module in (self.attention_out, *self.blocks.values()) if module is not None]
        handles += [module.register_forward_hook(self._keep) for module in inner]
        for handle in handles:
            hooks.callback(handle.remove)

    def _enter(self, _, args, kwargs) -> None:
        entering = _first(args, kwargs)
        if not (entering.dim() == 3 and entering.shape[0] == 1 or entering.dim() == 4 and 1 in entering.shape[:2]):
            raise ValueError(
                f"layer {self.index} ({type(self.layer).__name__}) must receive a single sequence, with {self.width} "
                f"channels or several streams of them, got the shape {tuple(entering.shape)}"
            )
        streams = split(entering, self.width)
        self.seen = _Pass(entering, self.width, streams[0].numel(), known=[entering])
        # several streams are handed on as they are; a single one may be replaced by attention over depth
        if len(streams) > 1:
            self.turns.next_reads(None)

    def _child_in(self, child, args, kwargs) -> None:
        seen = self.seen
        # a child that runs outside of its layer, or mixes sources: that reads for others
        if seen is None or seen.stream_inputs(args, kwargs) > 1:
            return
        received = _first(args, kwargs)
        is_single = received.numel() == seen.elements
        if seen.read is None and is_single:
            seen.read = received
            # the layer before it has left that, or its own output
            if received.numel() == seen.received.numel():
                seen.over_depth = not _among(received, seen.received)
                self.turns.next_reads(split(received, self.width) if seen.over_depth else None)
        if seen.attention_update is None and seen.linear_update is None:
            return

        # Behind attention: what no child has produced is the sum of stream and update. With several streams a child
        # makes it, such as a hyper-connection, which mixes them.
        is_new = not _among(received, *seen.known)
        if seen.after_attention is not None:
            several = seen.received.numel() > seen.elements
            if several and is_new and seen.read_after is None and is_single:
                seen.read_after = received  # out of the streams, for the MLP
        elif (is_new or _among(received, *seen.mixed)) and received.numel() == seen.received.numel():
            seen.after_attention = received
        elif is_new and seen.read_after is None and is_single:
            seen.read_after = received

    def _child_out(self, child, args, kwargs, output) -> None:
        seen = self.seen
        if seen is None:
            return
        produced, received = _tensor(output), _first(args, kwargs)
        behind_attention, is_behind = seen.attention_update is not None, False
        mixes = seen.stream_inputs(args, kwargs) > 1

        # A norm (Gemma 2, OLMo 2) or a convolution (Inkling 2) behind a sublayer makes what it adds: in Gemma 3 270M,
        # layer 17 adds vectors of a norm of 6,609, where that of its MLP's own output is 1.6.
        if _is_norm(child) or (_size(child) < self.small and produced.numel() == received.numel()):
            if seen.attention_update is not None and _among(received, seen.attention_update):
                seen.attention_update, is_behind = produced, True
            for index, run in enumerate(seen.ran):
                if _among(received, run.added):
                    seen.ran[index], is_behind = run._replace(added=produced), True
            if seen.linear_update is not None and _among(received, seen.linear_update):
                seen.linear_update = produced

        if child in self.blocks and not is_behind and not mixes:
            seen.ran.append(_Run(child, received, produced, produced, behind_attention))
            is_mixer = self.attention is None and received.numel() == produced.numel() == seen.elements
            if is_mixer and seen.linear_update is None:
                seen.linear_update = produced  # of the MLP, if it is the only block
        seen.known.append(produced)
        if child is not self.attention and mixes:
            seen.mixed.append(produced)

    def _keep(self, module, args, output) -> None:
        if self.seen is None:
            return
        if module is self.attention_out:
            self.seen.attention_update = _tensor(output)
            self.seen.known.append(self.seen.attention_update)
        else:
            self.seen.linear[module] = output

    def _leave(self, _, args, output) -> None:
        seen, after = self.seen, _tensor(output)
        assert seen is not None
        # no child has read a single stream, so that the layer before may still wait
        if seen.read is None:
            self.turns.next_reads(None)
        entering = split(seen.read if seen.over_depth and seen.read is not None else seen.received, self.width)
        between = None if seen.after_attention is None else split(seen.after_attention, self.width)
        around = None
        if seen.attention_update is not None:
            if between is not None:
                around = (entering, between)
            elif len(entering) == 1:
                around = (entering, entering + seen.attention_update.view_as(entering))
            elif seen.read is not None and seen.read_after is not None:
                around = (split(seen.read, self.width), split(seen.read_after, self.width))

        mlp, update = self._mlp_update(seen, after)
        linear = seen.linear_update
        if linear is not None and update is not None and _among(linear, update):
            linear = None  # the MLP is the layer's only block
        if seen.attention_update is None and linear is None:
            read_by_mlp = seen.read
        else:
            several = seen.received.numel() > seen.elements
            read_by_mlp = seen.read_after if several or seen.after_attention is None else seen.after_attention
        self.turns.waiting = LayerStream(
            layer=self.index,
            entering=entering,
            leaving=split(after, self.width),
            around_attention=around,
            mlp_update=None if update is None else update.reshape(-1, update.shape[-1]),
            attention=self.attention_out,
            mlp=mlp,
            over_depth=seen.over_depth,
            updates=(seen.attention_update, update),
            reads=(seen.read, read_by_mlp),
            between=between,
            others=self._others(seen, mlp, linear),
            linear_update=linear,
        )
        self.seen = None

    def _mlp_update(self, seen: _Pass, after: Tensor) -> tuple[nn.Module | None, Tensor | None]:
        """Return the MLP and what it produced: the block that ran last, or None where several shared its input.

        A block whose output is the layer's own has added the residual (BERT): then its last linear layer counts.
        """
        if not seen.ran:
            return None, None
        # By the order of execution, since that of declaration tells nothing in hybrid and shared-expert models. What
        # runs last is not always the MLP (Gemma 4's projection, Inkling 2's convolution): its size tells.
        ran = [run for run in seen.ran if run.behind_attention] or seen.ran
        least = max(_size(run.block) for run in ran) / 8
        last = [run for run in ran if _size(run.block) >= least][-1]
        others = [run.received for run in seen.ran if run is not last and _size(run.block) >= least]
        if _among(last.received, *others):
            return None, None
        if not _among(last.produced, after):
            return last.block, last.added
        linear = self.blocks[last.block]
        return linear, None if linear is None else seen.linear.get(linear)

    def _others(
        self, seen: _Pass, mlp: nn.Module | None, linear: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what blocks other than attention and the MLP produced, before the MLP and behind it, by name."""
        before, behind = {}, {}
        are_mlp = [mlp is not None and mlp in (run.block, self.blocks[run.block]) for run in seen.ran]
        last = are_mlp.index(True) if True in are_mlp else len(are_mlp)
        for index, run in enumerate(seen.ran):
            is_sublayer = index == last or (linear is not None and _among(run.added, linear))
            if not is_sublayer and run.added.numel() == seen.elements and run.added.shape[-1] == self.width:
                (before if index < last else behind)[self.names[run.block]] = run.added
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


def _among(tensor: Tensor, *others: Tensor) -> bool:
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
