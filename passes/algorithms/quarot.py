"""QuaRot: rotate the residual stream of an RMS-norm transformer inside its weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.errors import UnsupportedError, module_path
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.idioms.rms_norm import NORMALIZED, RMS_NORM
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    ADD,
    CASTS,
    EMBEDDING,
    IDENTITIES,
    LINEAR,
    MUL,
    SELECT,
    SLICE,
    argument,
    arguments,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import find_matches
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, move_spec, record_float
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.grid import Declined

_MOVES = (*CASTS, *IDENTITIES, *SLICE, *SELECT)


@dataclass(frozen=True, slots=True)
class _Norm:
    """An RMS norm: what it reads, the operators inside, its gain, and the value it hands on."""

    source: Node
    inside: frozenset[Node]
    gain: tuple[Node, str] | None
    out: Node


@dataclass(slots=True)
class _Stream:
    """A residual stream, and all that writes and reads it.

    Args:
        width: of its last axis.
        norms: that read it, each with the linears behind it.
        writers: linears whose outputs are added to it.
        tables: embeddings that it begins with.
        values: the tensors that it is.
    """

    width: int
    norms: dict[Node, tuple[_Norm, list[Node]]] = field(default_factory=dict)
    writers: dict[Node, None] = field(default_factory=dict)
    tables: dict[Node, None] = field(default_factory=dict)
    values: set[Node] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuaRot(Algorithm):
    """Fold the gains of RMS norms into linears, and rotate what flows between the layers.

    An RMS norm without gain hands a rotation on: norm(h Q) = norm(h) Q. So every linear and
    embedding that writes the residual stream takes Q behind it and every linear that reads it the
    inverse, and the model computes what it did. Channels with outliers are spread over all by a
    Hadamard matrix with random signs, which leaves activations and weights that round with less
    error. Rotations of queries, keys, values and of the KV cache are left out.

    Before:  h = h + linear(x, w);       linear(rms_norm(h, g), v)
    After:   h = h + linear(x, Q^T w);   linear(rms_norm(h, 1), v diag(g) Q)

    With `online_block` the inputs of linears that read no norm are rotated too, at run time and in
    blocks of so many channels: `linear(x, w)` becomes `linear(H x, w H^T)`.

    Args:
        seed: of the signs.
        online_block: 0 to rotate nothing at run time.
    """

    name: ClassVar[str] = "quarot"
    paper: ClassVar[str] = (
        "Ashkboos et al. 2024, QuaRot, arXiv 2404.00456; Liu et al. 2024, SpinQuant, "
        "arXiv 2405.16406"
    )
    fits: ClassVar[str] = "transformers whose residual stream is read by RMS norms alone"

    seed: int = 0
    online_block: int = 0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Each residual stream, and with `online_block` the inputs behind no norm.

        Raises:
            UnsupportedError: something else reads or writes a stream; names it.
        """
        norms = _norms(graph)
        streams: list[_Stream] = []
        for norm in norms.values():
            if not any(norm.source in stream.values for stream in streams):
                streams.append(_traced(graph, norms, norm.source))
                yield Site(graph, norm.out, "residual", streams[-1])
        if not streams or not self.online_block:
            return
        done = {linear for s in streams for _, linears in s.norms.values() for linear in linears}
        for linear in graph.calls(LINEAR):
            if linear not in done and Q_ANNOTATION_KEY in linear.meta:
                yield Site(graph, linear, "input")

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Rotate one stream, or one input at run time."""
        if site.slot == "input":
            return self._rotate_input(site.graph, site.node)
        stream, graph = site.plan, site.graph
        turn = rotation(stream.width, self.seed)
        for call in stream.tables:
            _replace(graph, call, "weight", lambda table: table @ turn)
        for call in stream.writers:
            _replace(graph, call, "weight", lambda weight: turn.T @ weight)
            if argument(call, "bias") is not None:
                _replace(graph, call, "bias", lambda bias: bias @ turn)
        for norm, linears in stream.norms.values():
            gain = torch.ones(stream.width, dtype=torch.float64)
            if norm.gain is not None:
                gain = _value(graph, *norm.gain).double()
                call, name = norm.gain
                _replace(graph, call, name, torch.ones_like)
            for linear in linears:
                _replace(graph, linear, "weight", lambda weight, g=gain: weight * g @ turn)
        return (
            f"quarot: the residual stream of {stream.width} channels is rotated in "
            f"{len(stream.tables)} tables and {len(stream.writers)} linears that write it, and in "
            f"{sum(len(linears) for _, linears in stream.norms.values())} linears that read it"
        )

    def _rotate_input(self, graph: AlgorithmGraph, linear: Node) -> str:
        source, width = argument(linear, "input"), argument(linear, "weight").meta["val"].shape[-1]
        size = self.online_block
        if width % size:
            raise Declined(f"{width} channels are no whole number of blocks of {size}")
        weight = graph.constant(linear, "weight")
        turn = rotation(size, self.seed)
        blocks = weight.value.double().reshape(-1, width // size, size) @ turn
        weight.set(blocks.reshape(weight.value.shape))
        editor, owner = graph.editor, module_path(linear)
        name = f"{owner}.input_rotation" if owner else "input_rotation"
        held = turn.T.contiguous().to(source.meta["val"].dtype)
        matrix = editor.constant(name, held, like=linear)
        sizes = [width // size, size]
        split = editor.call(aten.unflatten.int, source, -1, sizes, like=linear)
        turned = editor.call(aten.linear.default, split, matrix, like=linear)
        made = editor.call(aten.flatten.using_ints, turned, -2, -1, like=linear)
        linear.replace_input_with(source, made)
        move_spec(linear, source, made)
        reason = f"{self.name} put it there, to spread outlier channels"
        record_float(graph, turned, reason, held)
        return f"quarot: its input is rotated at run time in blocks of {size}"


def _norms(graph: AlgorithmGraph) -> dict[Node, _Norm]:
    """The RMS norms over the last axis, by the operator that normalizes."""
    found = {}
    for _, match in find_matches(graph.gm.graph, [("norm", op) for op in NORMALIZED]):
        source = match["x"]
        if list(match["dims"]) in ([-1], [source.meta["val"].dim() - 1]):
            out, gain = _gain_behind(match.anchor)
            found[match.anchor] = _Norm(source, frozenset(match.covered), gain, out)
    for call in graph.calls(RMS_NORM):
        if len(argument(call, "normalized_shape")) == 1:
            gain = (call, "weight") if argument(call, "weight") is not None else None
            found[call] = _Norm(argument(call, "input"), frozenset({call}), gain, call)
    return found


def _gain_behind(node: Node) -> tuple[Node, tuple[Node, str] | None]:
    """The product with a gain that alone reads a value, and which of its operands that is."""
    out = node
    while len(out.users) == 1 and is_call(next(iter(out.users)), CASTS):
        out = next(iter(out.users))
    reader = next(iter(out.users)) if len(out.users) == 1 else None
    if reader is not None and is_call(reader, MUL):
        for name in ("self", "other"):
            operand = argument(reader, name)
            if isinstance(operand, Node) and operand.op == "get_attr":
                return reader, (reader, name)
    return out, None


def _traced(graph: AlgorithmGraph, norms: Mapping[Node, _Norm], start: Node) -> _Stream:
    """The whole stream that a value is of."""
    stream = _Stream(start.meta["val"].shape[-1])
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if value not in stream.values:
            stream.values.add(value)
            waiting += _made_of(graph, stream, value)
            for user in value.users:
                waiting += _read_by(graph, norms, stream, value, user)
    return stream


def _made_of(graph: AlgorithmGraph, stream: _Stream, value: Node) -> list[Node]:
    """The values of the stream that one is computed from; takes in what writes it."""
    if is_call(value, ADD):
        operands = [n for n in value.all_input_nodes if isinstance(n, Node)]
        shapes = {tuple(n.meta["val"].shape[-1:]) for n in operands}
        if len(operands) == 2 and shapes == {(stream.width,)}:
            return operands
    elif _moves(value):
        return value.all_input_nodes[:1]
    elif is_call(value, LINEAR) and _is_constant(graph, value, "weight"):
        stream.writers[value] = None
        return []
    elif is_call(value, EMBEDDING) and _is_constant(graph, value, "weight"):
        stream.tables[value] = None
        return []
    raise _refusal(value, "writes the residual stream, and is no linear, embedding or sum")


def _read_by(
    graph: AlgorithmGraph,
    norms: Mapping[Node, _Norm],
    stream: _Stream,
    value: Node,
    user: Node,
) -> list[Node]:
    """The values of the stream that a reader makes of one; takes in the norms."""
    if is_call(user, ADD) or _moves(user):
        return [user]
    for anchor, norm in norms.items():
        if user in norm.inside and norm.source is value:
            if anchor not in stream.norms:
                stream.norms[anchor] = norm, _linears_behind(graph, norm, norm.out)
            return []
    raise _refusal(user, "reads the residual stream, and is no RMS norm over its last axis")


def _linears_behind(graph: AlgorithmGraph, norm: _Norm, value: Node) -> list[Node]:
    """The linears that read a norm, also behind slices of it."""
    found: list[Node] = []
    for user in value.users:
        if _moves(user):
            found += _linears_behind(graph, norm, user)
        elif is_call(user, LINEAR) and _is_constant(graph, user, "weight"):
            found.append(user)
        else:
            raise _refusal(user, f"reads the RMS norm {norm.out.name}, and is no linear")
    return found


def _moves(node: Node) -> bool:
    """True if an operator moves rows of the stream and leaves its channels."""
    if not is_call(node, _MOVES):
        return False
    dim, rank = arguments(node).get("dim"), node.all_input_nodes[0].meta["val"].dim()
    return dim is None or dim % rank != rank - 1


def _is_constant(graph: AlgorithmGraph, call: Node, name: str) -> bool:
    operand = argument(call, name)
    return isinstance(operand, Node) and constant_of(graph.gm, operand) is not None


def _refusal(node: Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"quarot cannot rotate this model: {node.name} {why}",
        node=node,
        fix="leave quarot out; awq and gptq ask for no such structure",
    )


def _value(graph: AlgorithmGraph, call: Node, name: str) -> Tensor:
    value = constant_of(graph.gm, argument(call, name))
    assert value is not None  # as `_is_constant` and `_gain_behind` found
    return value


def _replace(graph: AlgorithmGraph, call: Node, name: str, change: Any) -> None:
    """Give one operator another constant; others that read the same one keep it."""
    old, value = argument(call, name), _value(graph, call, name)
    new = graph.editor.rebind(old, change(value.double()).to(value.dtype), reader=call)
    if new is not old:
        call.replace_input_with(old, new)
        move_spec(call, old, new)


def rotation(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix float64[size, size].

    A Hadamard matrix with random signs, divided by sqrt(size), where Sylvester's doubling or
    Paley's constructions give one; else the orthogonal factor of a random matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    found = hadamard(size)
    if found is None:
        made = torch.randn(size, size, generator=generator, dtype=torch.float64)
        orthogonal: Tensor = torch.linalg.qr(made)[0]
        return orthogonal
    signs = torch.randint(2, (size,), generator=generator).double() * 2 - 1
    scaled: Tensor = found.double() * signs[:, None] / size**0.5
    return scaled


def hadamard(size: int) -> Tensor | None:
    """A matrix of 1 and -1 with orthogonal rows, int8[size, size]; None if no construction fits.

    >>> hadamard(2)
    tensor([[ 1,  1],
            [ 1, -1]], dtype=torch.int8)
    """
    if size == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    if size == 2:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    if size % 4:
        return None
    found = _paley(size)
    if found is not None:
        return found
    half = hadamard(size // 2)
    return None if half is None else torch.kron(torch.tensor([[1, 1], [1, -1]]), half).char()


def _paley(size: int) -> Tensor | None:
    """By quadratic residues of a prime q: q + 1 = size, or 2 (q + 1) = size (Paley 1933)."""
    if _is_prime(size - 1):
        return _bordered(size - 1, corner=-1) + torch.eye(size, dtype=torch.int8)
    q = size // 2 - 1
    if q % 4 != 1 or not _is_prime(q):
        return None
    symmetric, identity = _bordered(q, corner=1), torch.eye(q + 1, dtype=torch.int8)
    ones = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    rest = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(symmetric, ones) + torch.kron(identity, rest)


def _bordered(q: int, corner: int) -> Tensor:
    """Jacobsthal's matrix with a row of 1 above it and a column of `corner` beside it."""
    squares = torch.arange(1, q).square() % q
    character = torch.full((q,), -1, dtype=torch.int8)
    character[squares] = 1
    character[0] = 0
    index = torch.arange(q)
    made = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    made[0, 1:], made[1:, 0] = 1, corner
    made[1:, 1:] = character[(index[:, None] - index) % q]
    return made


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))
