"""The face every artifact has, and the face every backend has."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.backends.generate import generate
from pt2e_quant.backends.known_calls import KnownCalls, result_builder
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, MissingExtraError
from pt2e_quant.core.max_sizes import shown_sizes
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.op_table import OpTable

__all__ = ["Artifact", "Backend", "Verify", "is_installed", "read_file", "write_artifact"]

Verify: TypeAlias = bool | Literal["process"]
"""Whether a lowering checks its artifact: not, in this process, or in a new one as well."""


class Artifact(ABC):
    """A lowered program.

    Args:
        capture: the call it was captured with.
        report: what became of every tensor.
    """

    def __init__(self, capture: Capture, report: Report) -> None:
        self.capture = capture
        self.report = report
        report.inputs = shown_sizes(capture)
        self._calls = KnownCalls(capture)
        self._build_result = result_builder(capture.out_spec)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the float model: its own arguments in, its own result structure out.

        Raises:
            InputError: the inputs do not fit the captured graph, or hold no data.
        """
        return self._build_result(self.run_leaves(self._calls.bind(args, kwargs)))

    def generate(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """Go on with a text, with a language model that `pq.export_causal_lm` exported.

        Starts with an empty cache and leaves an empty one.

        Args:
            ids: int64[1, T], the prompt; longer ones than one call takes are given in parts.
            max_new_tokens: how many tokens to add at most.
            eos_token_id: stop behind this token.
            temperature: 0 takes the most likely token; above, tokens are drawn.
            seed: of the draws.

        Returns:
            int64[1, T + new]: the prompt and what follows it.

        Raises:
            InputError: the program is no such model, or its cache holds fewer tokens.
        """
        self.reset()
        try:
            return generate(
                self.run,
                self.capture,
                ids,
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                temperature=temperature,
                seed=seed,
            )
        finally:
            self.reset()

    @abstractmethod
    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves in placeholder order; returns the result's leaves."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers: the next call starts as the first did."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """The buffers that calls write, by name, as they are now; empty if it cannot show them."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the file; a temporary name first, then renamed.

        Raises:
            ArtifactError: the path cannot be written.
        """

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the file that `save` writes."""


class Backend(ABC):
    """One place where quantized programs run."""

    name: str
    """As in `pt2e_quant.backends.get(name)`."""
    suffix: str
    """Of the files it writes, with the dot."""
    extra: str = ""
    """The extra of this package that it needs, "" for none."""
    packages: tuple[str, ...] = ()
    """What that extra installs, as it is imported."""

    def require_extra(self) -> None:
        """Refuse before any long work where a package is missing.

        Raises:
            MissingExtraError: naming the package and the command that installs it.
        """
        for package in self.packages:
            if not is_installed(package):
                raise MissingExtraError(self.extra, package)

    @property
    @abstractmethod
    def table(self) -> OpTable:
        """What it can run."""

    @property
    @abstractmethod
    def recipes(self) -> Mapping[str, str]:
        """Recipe names with a line of explanation each."""

    @abstractmethod
    def quantizer(self, recipe: str = "int8") -> TableQuantizer:
        """A fresh quantizer for a recipe.

        Raises:
            ConfigError: no recipe has that name; near names are offered.
        """

    @abstractmethod
    def lower(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any] | None = None,
        *,
        strict: bool = True,
        verify: Verify = True,
        margin_db: float = 6.0,
        validate: bool = False,
    ) -> Artifact:
        """Canonical graph to artifact.

        Args:
            gm: of convert_pt2e.
            example_inputs: inputs for the check run; calibration's first batch by default.
            strict: make errors of what the report would warn of.
            verify: run the artifact against the canonical graph, at several sizes of each dynamic
                dimension; "process": also saved, loaded and run in a new process first, so that
                a crash of the runtime is an error.
            margin_db: how much nearer the artifact must be to the canonical graph than that
                is to the float graph.
            validate: hold the graph against itself after each pass of the lowering, on the sample,
                fresh data and extreme inputs, and name the pass that changed a value.

        Raises:
            InvariantError: the graph is not canonical, or a pass changed what it computes.
            ArtifactError: the artifact fails its check.
            MissingExtraError: the backend's package is not installed.
        """

    @abstractmethod
    def load(self, path: str | Path) -> Artifact:
        """Read a file that `save` wrote.

        Raises:
            ArtifactError: the file is missing, damaged or not one of ours.
        """


def write_artifact(path: str | Path, data: bytes) -> None:
    """Write an artifact's file, whole or not at all.

    Raises:
        ArtifactError: the path cannot be written.
    """
    try:
        with whole_file(Path(path)) as stream:
            stream.write(data)
    except OSError as error:
        raise ArtifactError(
            f'cannot write "{path}": {error.strerror or error}',
            fix="give a path in a folder that exists and can be written",
        ) from error


def read_file(path: str | Path) -> bytes:
    """The bytes of a file that an artifact wrote.

    Raises:
        ArtifactError: it is missing or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(
            f'cannot read "{path}": {error.strerror or error}',
            fix="give the path of a file that an artifact saved",
        ) from error


def is_installed(package: str) -> bool:
    """Whether a package can be imported; nothing is imported to find out."""
    try:
        return find_spec(package) is not None
    except ValueError:  # its entry in sys.modules is None: importing it is refused
        return False
