"""The face every artifact has."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor

from pt2e_quant.backends.generate import generate
from pt2e_quant.backends.known_calls import KnownCalls, result_builder
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.max_sizes import shown_sizes
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.report.report import Report

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

    def keep_figures(self) -> None:  # noqa: B027  (an artifact whose file has no place for them)
        """Write what the check found into the file that `save` writes."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the file that `save` writes."""


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
