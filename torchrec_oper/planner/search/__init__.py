"""The search: round each table to a candidate, place its pieces, level the ranks."""
