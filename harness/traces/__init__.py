"""Traces of public and own formats, one reader a file, all into ``Workload``.

``docs/traces.md`` describes the formats, the two modes, and where the public traces can be had.
"""

from cxlbench.harness.traces.lines import Progress, TraceError
from cxlbench.harness.traces.own_format import write_workload
from cxlbench.harness.traces.reading import (
    FORMATS,
    detect_format,
    open_trace,
    read_trace,
    require_format_with_ids,
)
from cxlbench.harness.traces.stream import Format, TraceStream

__all__ = [
    "FORMATS",
    "Format",
    "Progress",
    "TraceError",
    "TraceStream",
    "detect_format",
    "open_trace",
    "read_trace",
    "require_format_with_ids",
    "write_workload",
]
