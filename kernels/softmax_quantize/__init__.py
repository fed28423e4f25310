"""Softmax of scaled and masked scores, written as integers."""
