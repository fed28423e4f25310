"""The result of `verify_parity`: how far an artifact is from the integer reference."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.json_text import json_text


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParity:
    """One quantized tensor.

    Attributes:
        node: the operator that makes it.
        operator: as "aten.conv2d".
        share_equal: of its values, 0 to 1.
        most_steps: the largest difference, in integers.
        is_run_time: its scale is chosen at run time: a runtime hands out no such integers, and
            they are read off the product behind them.
    """

    node: str
    operator: str
    share_equal: float
    most_steps: float
    is_run_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """An artifact against the integer reference.

    Attributes:
        profile: whose rounding the reference has.
        nodes: in graph order; the last one is the last quantized tensor.
        floats: operators that the artifact computes in float, and so does the reference: both
            round the same graph. Sums of floats depend on their order, so that a result near a tie
            may be a step apart, and what reads it more.
        integers: the tensors of `nodes` where the reference goes on from the artifact's own
            integers behind each operator in float, so that only integers are compared; empty if
            nothing is float between integers.
        of_floats: what the operators in float give, at the same integers in front of them.
        slower: those of them that are float because that is faster.
        not_compared: operators whose integers cannot be read, and why: what makes a tensor with a
            scale of run time that no product alone reads, and recurrent layers.
    """

    profile: str
    nodes: tuple[NodeParity, ...]
    floats: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    integers: tuple[NodeParity, ...] = ()
    of_floats: tuple[NodeParity, ...] = ()
    not_compared: tuple[tuple[str, str], ...] = ()

    @property
    def table(self) -> tuple[NodeParity, ...]:
        """The same as nodes."""
        return self.nodes

    @property
    def share_equal(self) -> float:
        """The share of equal values of the last quantized tensor."""
        return self.nodes[-1].share_equal

    @property
    def most_steps(self) -> float:
        """The largest difference in the last quantized tensor."""
        return self.nodes[-1].most_steps

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each of `nodes`."""
        return [asdict(node) for node in self.nodes]

    def to_json(self) -> str:
        """Return JSON."""
        return json_text(asdict(self))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each of `nodes`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def __str__(self) -> str:
        """The table."""
        lines = _lines(self.nodes)
        title = f"against the integer reference, profile {self.profile}"
        if self.integers:
            lines += ["from the artifact's own integers behind what is float:"]
            lines += _lines(self.integers)
            lines += ["what is float, at the artifact's own integers:", *_lines(self.of_floats)]
        others = [name for name in self.floats if name not in self.slower]
        if others:
            lines.append(f"in float, in the reference too: {', '.join(others)}")
        if self.slower:
            lines.append(f"likewise, because that is faster: {', '.join(self.slower)}")
            lines.append("lower(..., allow_slower=True) computes them in integers")
        lines += [f"not compared: {name}, {reason}" for name, reason in self.not_compared]
        return "\n".join([title, f"{'node':32} {'operator':24} {'equal':>8} {'steps':>6}", *lines])


def _lines(rows: Iterable[NodeParity]) -> list[str]:
    return [
        f"{n.node:32} {n.operator:24} {n.share_equal:8.3%} {n.most_steps:6g}"
        + ("  scale of run time" if n.is_run_time else "")
        for n in rows
    ]
