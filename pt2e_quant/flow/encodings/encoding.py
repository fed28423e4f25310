"""One tensor's qparams, independent of any file's form."""

from dataclasses import dataclass

from pt2e_quant.core.errors import ArtifactError


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The qparams of one tensor.

    Attributes:
        name: of the parameter, or of the node that makes the tensor.
        is_param: whether it is a constant.
        bits: width of the integers.
        is_symmetric: zero is the middle of the range.
        scale: real units per integer step; one, or one per channel or group in row order.
        zero_point: the integer that stands for zero if the least one is called 0; as many as scale.
        quant_min: least integer used, counted in the same way; None if the file does not say.
        quant_max: greatest integer used, likewise.
        axis: of the channels; None per tensor, in groups, or if the file does not say.
        group_size: how many neighbours of a row share a scale; None if they are not in groups.
        is_float: the tensor is to stay float; the rest says nothing.
        steps: what an algorithm did to the tensor itself before these qparams were chosen.
    """

    name: str
    is_param: bool
    bits: int
    is_symmetric: bool
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()
    quant_min: int | None = None
    quant_max: int | None = None
    axis: int | None = None
    group_size: int | None = None
    is_float: bool = False
    steps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_float:
            return
        if not 1 <= self.bits <= 32 or not self.scale or len(self.scale) != len(self.zero_point):
            raise ArtifactError(
                f'the encoding of "{self.name}" has {self.bits} bits, {len(self.scale)} scales and '
                f"{len(self.zero_point)} offsets",
                fix="as many offsets as scales, at least one, and 1 to 32 bits",
            )
        if not all(0 < s < float("inf") for s in self.scale):
            raise ArtifactError(f'a scale of "{self.name}" is no positive number')
        if not all(0 <= z < 1 << self.bits for z in self.zero_point):
            raise ArtifactError(
                f'an offset of "{self.name}" is outside of the {1 << self.bits} integers of '
                f"{self.bits} bits"
            )
