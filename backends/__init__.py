"""Floor 4: op table, lowering and artifact, one folder each."""
