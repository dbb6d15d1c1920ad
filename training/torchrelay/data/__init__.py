"""Data in an order that survives restarts: datasets named by content, a keyed permutation, an elastic sampler, seeded loading."""
