"""Products computed as out^T = W x^T: the order of tiles, sums over splits of K."""
