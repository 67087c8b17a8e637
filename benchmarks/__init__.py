"""The benchmarks of `make bench`. Each module pairs both sides in one run and gives medians and their ratio."""
