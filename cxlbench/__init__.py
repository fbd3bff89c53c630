"""cxlbench: a test bench for KV-cache tiers on CXL memory, without the hardware.

The packages below are chapters: ``emu`` (clocks, pipes, memory, faults), ``devices`` (the
hardware, as profiles and models), ``kv`` (what a KV block is, and the protocols around it),
``hymcache`` (the remote tier of the HyMCache paper) and ``harness`` (traces, workers, results,
the command line).
"""

__version__ = "0.1.0"
