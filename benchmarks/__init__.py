"""Programs that measure: each prints ratios of one run, interleaved with a peer or a limit, and writes JSON to ``benchmarks/out``."""
