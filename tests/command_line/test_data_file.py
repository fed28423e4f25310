import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pt2e_quant.command_line.data_file import read_data
from pt2e_quant.core.errors import ArtifactError, InputError


def test_read_data_when_the_format_differs_then_the_same_arrays(tmp_path):
    x = torch.randn(3, 2)
    np.savez(tmp_path / "a.npz", x=x.numpy())
    save_file({"x": x}, tmp_path / "a.safetensors")
    torch.save({"x": x}, tmp_path / "a.pt")
    for suffix in (".npz", ".safetensors", ".pt"):
        data = read_data(str(tmp_path / f"a{suffix}"))
        assert data.batches is None
        assert list(data.arrays) == ["x"]
        assert torch.equal(data.arrays["x"], x)


def test_read_data_when_a_pt_list_then_batches_and_a_lone_tensor_an_array(tmp_path):
    torch.save([(torch.ones(1),), {"x": torch.ones(2)}], tmp_path / "batches.pt")
    torch.save(torch.ones(4), tmp_path / "images.pt")
    assert len(read_data(str(tmp_path / "batches.pt")).batches) == 2
    assert list(read_data(str(tmp_path / "images.pt")).arrays) == ["images"]


def test_read_data_when_a_function_is_named_then_its_batches(tmp_path, monkeypatch):
    (tmp_path / "my_batches_a.py").write_text("def make():\n    yield from [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert list(read_data("my_batches_a:make").batches) == [1, 2]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no_such_module:make", 'no module "no_such_module"'),
        ("json:lods", 'no function "lods": did you mean "loads"'),
        ("tempfile:gettempdir", "returned a str, expected an iterable of batches"),
    ],
)
def test_read_data_when_the_function_does_not_exist_then_named(source, words):
    with pytest.raises(InputError, match=words):
        read_data(source)


def test_read_data_when_the_module_fails_to_import_then_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "my_batches_b.py").write_text("import not_installed_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        read_data("my_batches_b:make")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("content", [b"", b"not numbers" * 20])
def test_read_data_when_a_file_is_damaged_then_named_with_the_fix(tmp_path, suffix, content):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"data\S+ is damaged") as caught:
        read_data(str(path))
    assert "fix" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_read_data_when_an_npz_is_truncated_then_damaged(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(10_000, dtype=np.float32))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ArtifactError, match=r"data\.npz is damaged"):
        read_data(str(path))


def test_read_data_when_a_byte_of_an_npz_is_flipped_then_damaged(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(10_000, dtype=np.float32))
    content = bytearray(path.read_bytes())
    content[20_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"data\.npz is damaged"):
        read_data(str(path))


def test_read_data_when_objects_are_stored_then_refused_without_unpickling(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}], dtype=object))
    torch.save(torch.nn.Linear(1, 1), tmp_path / "a.pt")
    with pytest.raises(ArtifactError, match="numbers only"):
        read_data(str(tmp_path / "a.npz"))
    with pytest.raises(ArtifactError, match="more than tensors: loading with weights_only"):
        read_data(str(tmp_path / "a.pt"))


def test_read_data_when_the_contents_are_no_numbers_then_refused(tmp_path):
    np.savez(tmp_path / "text.npz", x=np.array(["a", "b"]))
    np.savez(tmp_path / "empty.npz")
    torch.save({"x": 3}, tmp_path / "number.pt")
    for name, words in [
        ("text.npz", "a dtype that torch does not have"),
        ("empty.npz", "holds no arrays"),
        ("number.pt", "holds a dict"),
    ]:
        with pytest.raises(InputError, match=words):
            read_data(str(tmp_path / name))


def test_read_data_when_the_file_is_missing_or_of_unknown_suffix_then_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"no data file .*gone\.npz"):
        read_data(str(tmp_path / "gone.npz"))
    with pytest.raises(ArtifactError, match=r'not "\.csv"'):
        read_data(str(tmp_path / "data.csv"))
