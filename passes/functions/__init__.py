"""Functions that a runtime lacks, written out with operators that it has."""
