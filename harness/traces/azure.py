"""Azure's LLM inference traces (Splitwise, ISCA'24): CSV of arrival times and lengths.

Columns: TIMESTAMP, ContextTokens, GeneratedTokens. There are no block ids: every request gets
blocks of its own, so that nothing is ever reused (``has_ids`` is False), and the block size must
be given. Times count from the first row; a row before it is an error, other disorder is sorted
by ``read_trace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from cxlbench.harness.requests import Request, blocks_of
from cxlbench.harness.traces.blocks import Chains
from cxlbench.harness.traces.lines import MOST_TOKENS, TraceError, numbered_lines
from cxlbench.harness.traces.stream import Asked, Format, TraceStream, trace_name

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_azure(asked: Asked) -> TraceStream:
    """Open an Azure trace; raises TraceError unless the block size is given."""
    if asked.block_tokens is None or asked.block_tokens < 1:
        raise TraceError(
            asked.path,
            None,
            f"block_tokens={asked.block_tokens}: this trace has no block ids, so it has no block "
            "size of its own; give one, such as 128 (each request then gets blocks of its own)",
        )
    return TraceStream(
        name=trace_name(asked.path),
        block_tokens=asked.block_tokens,
        has_sessions=False,
        sessions_contiguous=True,
        has_ids=False,
        requests=_requests(asked, asked.block_tokens),
    )


def _requests(asked: Asked, block_tokens: int) -> Iterator[Request]:
    lines = numbered_lines(asked.path, asked.progress)
    number, header = next(lines, (1, b""))
    if not _is_header(header):
        raise TraceError(asked.path, number, f"the first line is not {','.join(COLUMNS)}")
    chains = Chains()
    start: datetime | None = None
    for request_id, (number, text) in enumerate(lines):
        try:
            when, context, generated = text.decode().strip().split(",")
            time = datetime.fromisoformat(when)
            input_tokens, output_tokens = int(context), int(generated)
            start = start or time
            arrival_s = (time - start).total_seconds()
        except (ValueError, TypeError) as error:
            raise TraceError(
                asked.path, number, f"not a row of {','.join(COLUMNS)}: {error}"
            ) from None
        for tokens in (input_tokens, output_tokens):
            if not 0 <= tokens <= MOST_TOKENS:
                what = f"a length of {tokens} tokens: lengths are 0 to {MOST_TOKENS}"
                raise TraceError(asked.path, number, what)
        if arrival_s < 0:
            raise TraceError(
                asked.path, number, f"{when} is {-arrival_s} s before the first row: sort the file"
            )
        yield Request(
            request_id=request_id,
            session=str(request_id),
            turn=1,
            arrival_s=arrival_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            block_ids=chains.fresh(blocks_of(input_tokens, block_tokens, asked.mode)),
        )


def _is_header(line: bytes) -> bool:
    return line.removeprefix(BYTE_ORDER_MARK).strip() == ",".join(COLUMNS).encode()


FORMAT = Format(
    name="azure",
    title=f"Azure LLM inference: CSV with the header {','.join(COLUMNS)}",
    recognises=lambda line, _: _is_header(line),
    open=open_azure,
    has_ids=False,
)
