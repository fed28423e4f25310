"""Results as pandas DataFrames."""

from collections.abc import Sequence
from typing import Any

from pt2e_quant.core.errors import MissingExtraError


def data_frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("analysis", "pandas") from error
    return pandas.DataFrame(rows)
