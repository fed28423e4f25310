import sys
from pathlib import Path

# the models are those of benchmarks/, which is run from a checkout and is in no wheel
sys.path.append(str(Path(__file__).resolve().parents[2]))
