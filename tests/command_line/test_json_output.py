import inspect
import json
import math
from pathlib import Path

from pt2e_quant.command_line.analysis_commands import COMMANDS
from pt2e_quant.command_line.print_output import as_json

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "command_line.md"


def test_as_json_when_numbers_are_infinite_then_null():
    found = json.loads(as_json("bench", {"a": [math.inf, 1.5], "b": {"c": math.nan}}))
    assert found == {"schema": "pt2e-quant/bench/1", "a": [None, 1.5], "b": {"c": None}}


def test_commands_when_listed_then_each_prints_json_whose_keys_the_page_names():
    commands = [found.callback for found in COMMANDS.registered_commands]
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = {name.strip(" `") for row in rows for name in row.split(",")}
    assert {command.__name__ for command in commands} <= documented
    assert all("as_json" in inspect.signature(command).parameters for command in commands)
