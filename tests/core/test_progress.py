"""Progress bars go over what they are given, and show nothing where there is no terminal."""

import pytest

from pt2e_quant.core.progress import show_progress


@pytest.mark.parametrize("enabled", [True, False])
def test_show_progress_when_there_is_no_terminal_then_the_items_alone(capsys, enabled):
    assert list(show_progress(iter([1, 2]), "counting", enabled=enabled)) == [1, 2]
    assert list(show_progress([3], "counting", enabled=enabled)) == [3]
    assert capsys.readouterr() == ("", "")
