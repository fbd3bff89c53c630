"""Traces, workloads, workers, results and the command line that run the systems."""
