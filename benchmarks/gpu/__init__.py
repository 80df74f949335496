"""What isthmus does on one GPU, measured by one command; on a CPU the same code with small sizes.

python -m benchmarks.gpu --output results
"""
