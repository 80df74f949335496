"""Measurements; run with `make bench`. Dated results in `results/`."""
