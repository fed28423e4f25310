"""Makes pt2e_flows and pt2e_models importable: tests are no package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
