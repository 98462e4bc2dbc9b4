"""The common parts of all benchmarks: options, contestants that take turns, tables, charts, comparison of results."""
