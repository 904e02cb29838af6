"""q, k, v -> out, lse: the definition, and everything that computes it."""
