import struct
import zipfile

import pytest
import torch
from torch import nn

from pt2e_quant.command_line.program_file import load_program
from pt2e_quant.core.errors import ArtifactError


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.pt2"
    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(torch.tensor([[0.5, 0.25]]))
    torch.export.save(torch.export.export(model, (torch.zeros(1, 2),)), path)
    return path


def test_load_when_a_program_was_saved_then_it_comes_back(saved):
    ep = load_program(saved)
    assert ep.module()(torch.ones(1, 2)).item() == 0.75


def damaged_weight(content):
    at = content.index(struct.pack("<2f", 0.5, 0.25))
    return content[:at] + b"\x01" + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda b: b"", lambda b: b"hello" * 40, lambda b: b[: len(b) // 2], damaged_weight],
    ids=["empty", "text", "half", "one byte"],
)
def test_load_when_the_file_is_damaged_then_refused_with_its_name(saved, damage, caplog):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(ArtifactError, match=r"model\.pt2 is damaged") as caught:
        load_program(saved)
    assert "torch.export.save" in caught.value.fix
    assert not caplog.records


def test_load_when_of_torch_save_or_missing_then_told_apart(tmp_path):
    path = tmp_path / "weights.pt2"
    torch.save(nn.Linear(3, 2).state_dict(), path)
    with pytest.raises(ArtifactError, match=r"written by torch\.save"):
        load_program(path)
    with pytest.raises(ArtifactError, match="there is no file"):
        load_program(tmp_path / "gone.pt2")


def test_load_when_the_archive_is_another_then_refused(tmp_path):
    path = tmp_path / "other.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(ArtifactError, match=r"other\.pt2 is no program of torch\.export"):
        load_program(path)
