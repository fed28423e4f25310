"""One leaf of the call of an exported program."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.core.index_ranges import IndexRange


class InputKind(StrEnum):
    """The kind of one leaf of the call's pytree."""

    TENSOR = "tensor"
    SYMBOL = "symbol"
    LITERAL = "literal"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """One leaf of the call's pytree.

    Args:
        name: the placeholder's name.
        path: where it stands in the call, for example `x` or `z['q']`.
        kind: tensor, run-time integer, or a literal the graph was specialised to.
        shape: sizes of a tensor; a dynamic one is its symbolic expression as text.
        dtype: of a tensor, for example "float32".
        device: of a tensor, for example "cpu".
        value: of a literal; the expression of a run-time integer.
        indices: the least and the greatest value of a tensor that looks up rows; None for any.
    """

    name: str
    path: str
    kind: InputKind
    shape: tuple[int | str, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    value: bool | int | float | str | None = None
    indices: IndexRange | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields; without `indices` if there are none."""
        return {k: v for k, v in asdict(self).items() if k != "indices" or v}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "InputInfo":
        """Read what `to_json` gave."""
        indices = data.get("indices")
        return InputInfo(
            **{
                **data,
                "shape": tuple(data["shape"]),
                "kind": InputKind(data["kind"]),
                "indices": indices and (int(indices[0]), int(indices[1])),
            }
        )

    def takes(self, leaf: object) -> bool:
        """True unless an operator would read outside a tensor with a leaf's values.

        Values on other devices than the CPU are not looked at: that would wait for the device.
        """
        if self.indices is None or type(leaf) is not Tensor or leaf.device.type != "cpu":
            return True
        if not leaf.numel():
            return True
        low, high = leaf.aminmax()
        return self.indices[0] <= int(low) and int(high) <= self.indices[1]

    def check_indices(self, leaf: object) -> None:
        """Refuse a tensor with whose values an operator would read outside another one.

        Raises:
            InputError: naming the input, its values and those that it may have.
        """
        if not self.takes(leaf):
            assert isinstance(leaf, Tensor)
            assert self.indices is not None
            low, high = (int(value) for value in leaf.aminmax())
            raise InputError(
                f'input "{self.path}" has values from {low} to {high}, and the model looks up '
                f"rows {self.indices[0]} to {self.indices[1]} with them",
                fix="give indices within the table",
            )
