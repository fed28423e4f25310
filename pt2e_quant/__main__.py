"""The command `pt2e-quant`, also as `python -m pt2e_quant`."""

import logging
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from pt2e_quant.command_line.analysis_commands import COMMANDS
from pt2e_quant.core.errors import Pt2eQuantError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 for an error of ours, 2 for wrong usage."""
    # Warnings of other packages about their own code are nothing a user of a command can change.
    for module in ("torch", "executorch", "torchao", "onnxscript", "onnx_ir"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    for name in ("torchao", "torch.utils._pytree", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        COMMANDS(arguments)
    except Pt2eQuantError as error:
        # Without markup and wrapping: a message holds brackets, and a line to paste.
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"{type(error).__name__}: {error}", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
