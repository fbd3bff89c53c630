"""The figures and tables of both papers, one module each; ``cxlbench list`` shows them."""
