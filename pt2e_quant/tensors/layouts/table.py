"""Every layout by its name."""

from pt2e_quant.core.arguments import check_type
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.tensors.layouts.cpu_weights import Int4Rows, OneDnn
from pt2e_quant.tensors.layouts.gpu_weights import HalfTiles, Int4Tiles, SemiSparse, SwizzledScales
from pt2e_quant.tensors.layouts.layout import Layout, Packed, Plain

_ALL: tuple[Layout, ...] = (
    Plain(),
    Packed(),
    OneDnn(),
    Int4Rows(),
    Int4Tiles(),
    HalfTiles(),
    SemiSparse(),
    SwizzledScales(),
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _ALL}
"""Every layout by its name, those of `register_layout` too."""


def layout_named(name: str) -> Layout:
    """The layout of a name.

    Raises:
        ConfigError: there is none; near names are offered.
    """
    found = LAYOUTS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f'there is no layout "{name}"', fix=near(name, LAYOUTS))
    return found


def register_layout(layout: Layout) -> None:
    """Add a layout of one's own.

    Raises:
        ConfigError: it is no layout, or another has that name.
    """
    check_type(
        "layout",
        layout,
        Layout,
        "an object of a class of pq.tensors.Layout",
        fix="register_layout(MyLayout())",
    )
    check_type("layout.name", layout.name, str, "a string")
    if layout.name in LAYOUTS and type(LAYOUTS[layout.name]) is not type(layout):
        raise ConfigError(f'there is a layout "{layout.name}" already')
    LAYOUTS[layout.name] = layout
