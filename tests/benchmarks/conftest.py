import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# benchmarks/ is run from a checkout and is in no wheel: only these tests need it importable
sys.path.append(str(ROOT))
