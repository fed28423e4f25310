"""An artifact is saved, loaded and run in a new process: what dies there is an error here."""

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from pt2e_quant.backends import new_process
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.gate import check_artifact, choose_sample, loader_of
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.core.read_capture import capture_of

pytestmark = pytest.mark.usefixtures("unmeasured")

# A backend that a new process finds by its entry point; its file says what is wrong with it.
_BACKEND = '''
import os
import time
from pathlib import Path

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.lower import Options
from pt2e_quant.backends.target.recipe import Recipes
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.op_table import OpTable

HOME = {home}


class Doubling(Artifact):
    """Doubles, with a fault that only another process than its maker's has."""

    def __init__(self, capture, fault):
        super().__init__(capture, Report(backend="doubling", provenance=Provenance()))
        self.fault = fault
        self.calls = 0

    def run_leaves(self, leaves):
        (x,) = leaves
        self.calls += 1
        if os.getpid() != HOME:
            if self.fault == "abort" and len(x) == 8:
                os.abort()
            if self.fault == "exit":
                os._exit(7)
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "wrong" and self.calls == 3:
                return [x * 3]
        return [x * 2]

    def reset(self):
        pass

    def state(self):
        return {{}}

    def save(self, path):
        Path(path).write_text(self.fault + "\\n" + self.capture.to_json())

    @property
    def size_bytes(self):
        return 1


class Lowering:
    """Only reads files: what lowers is of no concern here."""

    options = Options

    @staticmethod
    def load(path):
        fault, text = Path(path).read_text().split("\\n")
        if fault == "load" and os.getpid() != HOME:
            raise ArtifactError("Missing operator: embedding_byte.out")
        return Doubling(Capture.from_json(text), fault)


BACKEND = Backend(
    name="doubling",
    suffix=".twice",
    table=OpTable(backend="doubling", rows=()),
    recipes=Recipes("Doubling", ()),
    lowering=Lowering,
)
'''


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.fixture
def gm() -> GraphModule:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    return torch.export.export(Double(), (x,), dynamic_shapes=({0: Dim("rows", max=8)},)).module()


@pytest.fixture
def doubling(tmp_path, monkeypatch) -> ModuleType:
    home = tmp_path / "site"
    info = home / "doubling-1.dist-info"
    info.mkdir(parents=True)
    (home / "doubling.py").write_text(_BACKEND.format(home=os.getpid()))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1\n")
    group = "[pt2e_quant.backends]\ndoubling = doubling:BACKEND\n"
    (info / "entry_points.txt").write_text(group)
    monkeypatch.syspath_prepend(home)
    import doubling

    yield doubling
    sys.modules.pop("doubling")


def check(doubling: Any, gm: GraphModule, fault: str) -> Artifact:
    artifact = doubling.Doubling(capture_of(gm), fault)
    loader = loader_of("process", "doubling")
    check_artifact(artifact, gm, choose_sample(gm, None), margin_db=6.0, loader=loader)
    return artifact


def test_process_when_the_artifact_is_right_there_and_here_then_it_passes(doubling, gm):
    artifact = check(doubling, gm, "none")
    assert artifact.calls == 8  # here as well


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("abort", r"died of SIGABRT, in call 3, with x \[8, 6\][^$]*Fatal Python error: Aborted"),
        ("exit", "ended with exit status 7, in call 1, with the sample"),
        ("load", "fails in a new process, loading it: Missing operator: embedding_byte.out"),
        ("wrong", r"graph in a new process, in call 3, with x \[8, 6\]: SQNR 6\.0 dB"),
    ],
)
def test_process_when_the_artifact_is_at_fault_there_then_an_error_names_the_call(
    doubling, gm, fault, text
):
    with pytest.raises(ArtifactError, match=text):
        check(doubling, gm, fault)


def test_process_when_it_hangs_then_it_is_stopped_at_the_limit(doubling, gm, monkeypatch):
    monkeypatch.setattr(new_process, "LIMIT_S", 30.0)
    with pytest.raises(ArtifactError, match=r"finished after 3\d s: in call 1, with the sample"):
        check(doubling, gm, "hang")


def test_process_when_done_then_no_file_is_left(doubling, gm, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ArtifactError):
        check(doubling, gm, "load")
    assert [*folder.iterdir()] == []


def test_verify_when_no_process_can_load_it_then_refused_before_any_work():
    assert loader_of(True, "plain") is None
    with pytest.raises(ConfigError, match='does not know the backend "plain"'):
        loader_of("process", "plain")
    with pytest.raises(ConfigError, match="verify is True, False or \"process\", found 'proces'"):
        loader_of("proces", "cpu")  # type: ignore[arg-type]


class Net(nn.Module):
    """A buffer that calls write, between two linears; a dict as result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("total", torch.zeros(32))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        self.total.add_(hidden.mean(0))
        return {"scores": self.last(hidden + self.total), "best": self.last(hidden).argmax(-1)}


@pytest.mark.parametrize(
    ("name", "needs"), [("cpu", "torch"), ("onnx", "onnxruntime"), ("xnnpack", "executorch")]
)
def test_backend_when_verified_in_a_new_process_then_the_artifact_is_loaded_there(
    name, needs, monkeypatch
):
    pytest.importorskip(needs)
    import pt2e_quant as pq
    from pt2e_quant.backends import gate

    ran = []

    def watched(*args: Any, **options: Any) -> Any:
        ran.append(new_process.run_in_new_process(*args, **options))
        return ran[-1]

    monkeypatch.setattr(gate, "run_in_new_process", watched)
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    artifact = pq.quantize(
        Net().eval(),
        (x,),
        dynamic_shapes={"x": {0: Dim("rows", min=1, max=8)}},
        calibration_data=[x, torch.randn(4, 16)],
        backend=name,
        verify="process",
        progress=False,
    )
    assert len(ran[0]) == 8
    assert artifact.run(x)["scores"].shape == (4, 8)
