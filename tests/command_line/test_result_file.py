import numpy as np
import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.command_line.result_file import (
    check_writable,
    join_results,
    result_names,
    write_npz,
)
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import rebuild_capture


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: x + 1, ["out"]),
        (lambda x: (x + 1, x + 2), ["out_0", "out_1"]),
        (lambda x: {"a": x + 1, "b": [x + 2]}, ["a", "b.0"]),
    ],
)
def test_results_when_named_then_by_their_path(make, names):
    capture = rebuild_capture(export(Returns(make), (torch.zeros(2),)).module())
    assert result_names(capture, [torch.zeros(2)] * len(names)) == names


def test_results_when_shapes_allow_then_joined():
    a, b = torch.ones(1, 3), torch.zeros(2, 3)
    assert join_results(["out"], [[a], [b]])["out"].shape == (3, 3)
    assert join_results(["n"], [[3], [4]])["n"].tolist() == [3, 4]
    apart = join_results(["out"], [[torch.ones(1, 3)], [torch.ones(1, 4)]])
    assert {name: tuple(t.shape) for name, t in apart.items()} == {
        "out.0": (1, 3),
        "out.1": (1, 4),
    }
    assert join_results(["none"], [[None]]) == {}


def test_write_npz_when_done_then_leaves_no_other_file(tmp_path):
    path = tmp_path / "out.npz"
    write_npz(path, {"file": torch.ones(2), "half": torch.ones(1, dtype=torch.bfloat16)})
    with np.load(path) as archive:
        assert archive["file"].tolist() == [1, 1]
        assert archive["half"].dtype == np.float32
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def test_check_writable_when_the_path_cannot_be_written_then_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in [
        (tmp_path / "none" / "a.pte", "there is no folder"),
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "a.pte", "there is no folder"),
    ]:
        with pytest.raises(ArtifactError, match=words):
            check_writable(path)
    check_writable(tmp_path / "fine.pte")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_check_writable_when_the_folder_is_read_only_then_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    # root writes everywhere, so the refusal itself is simulated
    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(ArtifactError, match="Permission denied"):
        check_writable(tmp_path / "a.pte")
