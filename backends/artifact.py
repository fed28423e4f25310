"""The interface that all artifacts have."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from pt2e_quant.backends.profile import Profile
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, InputError, UnsupportedError
from pt2e_quant.core.max_sizes import shown_sizes
from pt2e_quant.core.provenance import FloatOperator
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.causal_lm import generate
from pt2e_quant.flow.report.report import Report

Verify: TypeAlias = bool | Literal["process"]
"""The check of an artifact by its lowering: none, in this process, or in a new one as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownNode:
    """A node of a file as Model Explorer has it.

    Args:
        node: its id.
        graph: the id of its graph, "" where the file has one graph alone.
    """

    node: str
    graph: str = ""


class Artifact(ABC):
    """A lowered program.

    Args:
        capture: the call it was captured with.
        report: what became of every tensor.
    """

    def __init__(self, capture: Capture, report: Report) -> None:
        self.capture = capture
        self.report = report
        self.quantized: GraphModule | None = None
        """The canonical graph that `lower` was given; None if it is not known. It shares its
        tensors with that graph, and None lets them go."""
        report.inputs = shown_sizes(capture)
        self._calls = KnownCalls(capture)
        self._build_result = result_builder(capture.out_spec)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the float model: its own arguments in, its own result structure out.

        Raises:
            InputError: the inputs do not fit the captured graph, or hold no data.
        """
        return self._build_result(self.run_leaves(self._calls.bind(args, kwargs)))

    def generate(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """Continue a text with a language model that `pq.export_causal_lm` exported.

        Starts with an empty cache and leaves an empty one.

        Args:
            ids: int64[1, T], the prompt; longer ones than one call takes are given in parts.
            max_new_tokens: how many tokens to add at most.
            eos_token_id: stop behind this token.
            temperature: 0 takes the most likely token; above, tokens are drawn.
            seed: of the draws.

        Returns:
            int64[1, T + new]: the prompt and what follows it.

        Raises:
            InputError: the program is no such model, or its cache holds fewer tokens.
        """
        self.reset()
        try:
            return generate(
                self.run,
                self.capture,
                ids,
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                temperature=temperature,
                seed=seed,
            )
        finally:
            self.reset()

    def float_operators(self, gm: GraphModule) -> frozenset[str]:
        """The nodes of the graph that was lowered which the program computes in float.

        If the file does not list its operators, they are those that the report names.

        Args:
            gm: that graph.
        """
        told = {region.node for region in self.report.float_regions}
        return frozenset(node.name for node in gm.graph.nodes if node.name in told)

    def as_run(self, gm: GraphModule) -> GraphModule:
        """The graph that was lowered, without the q/dq that the program leaves out.

        Args:
            gm: that graph, which is not changed.
        """
        return gm

    def islands_in_file(self) -> tuple[list[FloatOperator], int]:
        """The operators in float of a file without a record of them, and how many are integer."""
        return [], sum(self.report.integer_ops.values())

    def node_ids(self, file: str) -> Mapping[str, ShownNode]:
        """Return the node of the file that makes each value, as Model Explorer names it.

        Args:
            file: the name that the artifact is saved under.

        Raises:
            UnsupportedError: the nodes of the file are not known, or there is no such file.
        """
        raise UnsupportedError(
            f"Model Explorer does not read files of {self.report.backend}",
            fix="leave out artifact=…, and load the figures beside the program's .pt2",
        )

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Time a call of the float model operator by operator.

        Buffers that calls write are as before the first call afterwards.

        Raises:
            InputError: the inputs do not fit the captured graph.
            UnsupportedError: the runtime cannot tell the time of an operator.
        """
        leaves = self._calls.bind(args, kwargs)
        try:
            self.run_leaves(leaves)  # operators prepare themselves in their first call
            self.reset()
            return self.time_operators(leaves)
        finally:
            self.reset()

    def time_operators(self, leaves: Sequence[Any]) -> Profile:
        """Time each operator of a call on its leaves, in placeholder order.

        Raises:
            UnsupportedError: the runtime cannot tell.
        """
        raise UnsupportedError(
            f"{self.report.backend} does not report the times of its operators",
            fix="profile the same recipe on another backend",
        )

    @abstractmethod
    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves in placeholder order; returns the result's leaves."""

    @abstractmethod
    def reset(self) -> None:
        """Restore the buffers: the next call starts as the first did."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """The buffers that calls write, by name, as they are now; empty if it cannot show them."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the file; a temporary name first, then renamed.

        Raises:
            ArtifactError: the path cannot be written.
        """

    def keep_figures(self) -> None:  # noqa: B027  (an artifact whose file has no place for them)
        """Add the results of the check to the file that `save` writes."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the file that `save` writes."""


def write_artifact(path: str | Path, data: bytes) -> None:
    """Write an artifact's file, whole or not at all.

    Raises:
        ArtifactError: the path cannot be written.
    """
    try:
        with whole_file(Path(path)) as stream:
            stream.write(data)
    except OSError as error:
        raise ArtifactError(
            f'cannot write "{path}": {error.strerror or error}',
            fix="give a path in a folder that exists and can be written",
        ) from error


def read_file(path: str | Path) -> bytes:
    """The bytes of a file that an artifact wrote.

    Raises:
        ArtifactError: it is missing or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(
            f'cannot read "{path}": {error.strerror or error}',
            fix="give the path of a file that an artifact saved",
        ) from error


def is_installed(package: str) -> bool:
    """True if a package can be imported; nothing is imported to find out."""
    try:
        return find_spec(package) is not None
    except ValueError:  # its entry in sys.modules is None: importing it is refused
        return False


LIMIT = 256
"""Signatures kept. A program with dynamic sizes can meet any number of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The sources of the leaves in placeholder order, for one signature.

    Args:
        order: positions among the call's own leaves followed by `literals`; None: as they stand.
        literals: values of the arguments that the call left out.
    """

    order: tuple[int, ...] | None
    literals: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the call's leaf at a position."""

    at: int


class KnownCalls:
    """Binds calls to a capture; the checks are made once per signature.

    A signature holds everything that the checks depend on: how the arguments are nested and named,
    the shape, dtype, layout and device of every tensor, the value of everything else. A call with
    containers or tensor types of other libraries is checked every time. Indices into tables are
    looked at in every call: ExecuTorch ends the process where one is outside.

    Args:
        capture: the call that the program was captured with.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._plans: dict[Hashable, _Plan] = {}
        self._has_indices = any(info.indices is not None for info in capture.inputs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call in placeholder order.

        Raises:
            InputError: the inputs do not fit the captured graph, or hold no data.
        """
        leaves: list[Any] = []
        signature: list[Any] = []
        is_plain = _read(args, leaves, signature)
        if kwargs:
            signature.append(tuple(kwargs))
            is_plain = is_plain and _read(kwargs.values(), leaves, signature)
        if not is_plain:
            return self._checked(args, kwargs)
        key = tuple(signature)
        plan = self._plans.get(key)
        if plan is None:
            self._checked(args, kwargs)
            plan = self._plan(args, kwargs)
            if len(self._plans) >= LIMIT:
                self._plans.clear()
            self._plans[key] = plan
        if plan.order is not None:
            leaves += plan.literals
            leaves = [leaves[at] for at in plan.order]
        if self._has_indices:
            self.capture.check_indices(leaves)
        return leaves

    def _checked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        leaves = self.capture.bind(args, kwargs)
        for info, leaf in zip(self.capture.inputs, leaves, strict=True):
            # A runtime would read where nothing is.
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise InputError(
                    f'input "{info.path}" is on the meta device: it has no data',
                    fix="give a tensor with values, on the CPU",
                )
        return leaves

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Plan:
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        slots = pytree.tree_unflatten([_Slot(at) for at in range(len(given))], spec)
        arranged = self.capture.arrange(*slots)
        literals = [leaf for leaf in arranged if not isinstance(leaf, _Slot)]
        behind = iter(range(len(given), len(given) + len(literals)))
        order = tuple(leaf.at if isinstance(leaf, _Slot) else next(behind) for leaf in arranged)
        return _Plan(None if order == tuple(range(len(given))) else order, tuple(literals))


def _read(values: Iterable[Any], leaves: list[Any], signature: list[Any]) -> bool:
    """Append the leaves of some arguments and their signature; False for an unknown type.

    Signatures are unambiguous: a tensor starts with its shape, everything else with its type.
    """
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            leaves.append(value)
            signature += (value.shape, value.dtype, value.layout, value.device)
        elif kind in (int, float, bool, str, type(None)):
            leaves.append(value)
            signature += (kind, value)
        elif kind is tuple or kind is list:
            signature += (kind, len(value))
            if not _read(value, leaves, signature):
                return False
        elif kind is dict:
            signature += (kind, tuple(value))
            if not _read(value.values(), leaves, signature):
                return False
        else:
            return False
    return True


def result_builder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """A function that puts leaves into a result structure.

    A structure of one level, of Python's own containers, takes no walk through pytree.
    """
    if spec.is_leaf():
        return _only
    is_flat = all(spec.child(at).is_leaf() for at in range(spec.num_children))
    if is_flat and spec.type is tuple:
        return tuple
    if is_flat and spec.type is list:
        return list
    if is_flat and spec.type is dict:
        keys = list(spec.context)
        return lambda leaves: dict(zip(keys, leaves, strict=True))
    return lambda leaves: pytree.tree_unflatten(leaves, spec)


def _only(leaves: Sequence[Any]) -> Any:
    (leaf,) = leaves
    return leaf
