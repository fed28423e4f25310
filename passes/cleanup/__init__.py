"""Passes that simplify a captured graph and leave its values as they are."""
