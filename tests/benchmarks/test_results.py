import json

from benchmarks import results


def test_write_results_when_a_row_is_measured_again_then_it_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    first = [{"model": "a", "ms": 1}, {"model": "b", "ms": 2}]
    results.write_results("speed", first, keys=("model",))
    path = results.write_results("speed", [{"model": "a", "ms": 3}], keys=("model",))
    stored = json.loads(path.read_text())
    assert stored["rows"] == [{"model": "b", "ms": 2}, {"model": "a", "ms": 3}]
    assert stored["conditions"]["packages"]["torch"].startswith("2.")


def test_installed_version_when_absent_then_says_so():
    assert results.installed_version("no-such-package-here") == "not installed"
