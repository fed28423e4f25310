"""Logs of searches become one row for each backend and run of seeds."""

import json

from benchmarks import results
from tests.fuzz.gather import gather, rows_of


def logged(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [
    {"seed": 3, "backend": "cpu", "outcome": "ok", "seconds": 0.25},
    {"seed": 4, "backend": "onnx", "outcome": "wrong", "seconds": 1.0},
    {"seed": 6, "backend": "cpu", "outcome": "crash"},
    {"seed": 9, "backend": "cpu", "outcome": "refused", "seconds": 0.5},
]


def test_rows_when_a_log_is_read_then_outcomes_are_counted_for_each_backend(tmp_path):
    cpu, onnx = rows_of(logged(tmp_path / "log", ROWS))
    assert (cpu["backend"], cpu["first_seed"], cpu["last_seed"], cpu["models"]) == ("cpu", 3, 9, 3)
    assert cpu["outcomes"] == {"crash": 1, "ok": 1, "refused": 1}
    assert cpu["failed_seeds"] == [6]
    assert (cpu["lowered_percent"], onnx["lowered_percent"]) == (33.3, 0.0)
    assert onnx["failed_seeds"] == [4]


def test_gather_when_the_same_seeds_ran_again_then_the_row_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    gather([logged(tmp_path / "log", ROWS)])
    mended = [row | {"outcome": "ok"} for row in ROWS]
    path = gather([logged(tmp_path / "log", mended)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["cpu", "onnx"]
    assert all(row["failed_seeds"] == [] for row in rows)
