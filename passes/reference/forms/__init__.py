"""The integer form of each float operator, and the table that lists them."""
