"""Activation functions in front of data movement: the same values, and finer integers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.activate_before_moves import activate_before_moves


class Net(nn.Module):
    """A convolution and what a test does with it."""

    def __init__(self, behind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.behind = nn.Conv2d(3, 8, 3, padding=1), behind

    def forward(self, x: Tensor) -> Any:
        return self.behind(self.conv(x))


X = torch.randn(2, 3, 6, 4)


def calls(gm: Any) -> list[str]:
    return [n.target.__name__.split(".")[0] for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("behind", "order"),
    [
        (lambda y: F.relu(F.pixel_shuffle(y, 2)), ["conv2d", "relu", "pixel_shuffle"]),
        (
            lambda y: F.gelu(y.flatten(2).transpose(1, 2)),
            ["conv2d", "gelu", "flatten", "transpose"],
        ),
        (lambda y: F.relu6(y.view(y.shape[0], -1)), ["conv2d", "relu6", "view"]),
        (lambda y: F.leaky_relu(y.permute(0, 2, 3, 1), 0.2), ["conv2d", "leaky_relu", "permute"]),
        (lambda y: F.relu(y[:, :, :-1]), ["conv2d", "relu", "slice"]),
    ],
)
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_activation_when_behind_moves_then_before_them_with_equal_values(
    behind: Callable[[Tensor], Any], order: list[str], is_dynamic: bool
) -> None:
    model = Net(behind).eval()
    sizes = ({0: torch.export.Dim("n", max=8)},) if is_dynamic else None
    gm: Any = torch.export.export(model, (X,), dynamic_shapes=sizes).module()
    assert activate_before_moves(gm).changed
    assert [name for name in calls(gm) if name in order] == order
    for x in (X, torch.randn(5, 3, 6, 4)) if is_dynamic else (X,):
        torch.testing.assert_close(gm(x), model(x))  # vectors of gelu end elsewhere
    assert not activate_before_moves(gm).changed


@pytest.mark.parametrize(
    "behind",
    [
        lambda y: F.relu(y),
        lambda y: (F.relu(moved := F.pixel_shuffle(y, 2)), moved),
        lambda y: F.relu(F.pixel_shuffle(y, 2)) + F.pixel_shuffle(y, 2),
        lambda y: F.gelu(y[:, :1]),
        lambda y: F.softmax(y.flatten(1), -1),
        lambda y: F.relu(F.max_pool2d(y, 2)),
    ],
)
def test_activation_when_another_value_would_change_then_it_stays(
    behind: Callable[[Tensor], Any],
) -> None:
    gm: Any = torch.export.export(Net(behind).eval(), (X,)).module()
    before = calls(gm)
    assert not activate_before_moves(gm).changed
    assert calls(gm) == before


@pytest.mark.parametrize("name", ["onnx", "xnnpack", "cpu"])
def test_backend_when_relu_is_behind_moves_then_no_integers_are_left_to_negative_numbers(
    name: str,
) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}.get(name, "torch"))
    torch.manual_seed(0)
    model = nn.Sequential(Net(lambda y: F.relu(F.pixel_shuffle(y, 2))), nn.Conv2d(2, 4, 3))
    quantizer = pq.backends.get(name).quantizer().allowing("slower")
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), (X,)), quantizer)
    pq.calibrate(prepared, [(X,)] * 2, progress=False)
    gm = pq.convert_pt2e(prepared)
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default)
    # The second convolution reads q/dq of relu's range, in which zero is the least integer.
    scale, zero, least = second.args[0].args[1:4]
    assert zero == least
    assert scale * 255 < 1.2 * model[0](X).max().item()
    assert {user.target.__name__ for user in first.users} == {"relu.default"}
