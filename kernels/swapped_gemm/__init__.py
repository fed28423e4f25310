"""What products that compute out^T = W x^T share: the order of tiles, sums over splits of K."""
