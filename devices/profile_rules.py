"""Rules between the fields of a profile: what a device cannot be, however well it is written.

Each rule takes values in base units (bytes, ratios, counts) and returns what is wrong, or None.
The kinds in ``profile_kinds.py`` name the fields that a rule looks at; the message is shown after
the key and the file.
"""

from __future__ import annotations

from cxlbench.devices.units import PAGE_BYTES, Dimension, format_base


def size(nbytes: float) -> str:
    """Return a size for a message, such as ``64 GiB``."""
    return format_base(nbytes, Dimension.SIZE)


def ordered(low: float, high: float) -> str | None:
    """Refuse a range whose low end is above its high end."""
    return None if low <= high else f"is above its upper end ({low:g} > {high:g})"


def whole_pages(nbytes: int) -> str | None:
    """Refuse what is not made of whole pages."""
    if nbytes >= PAGE_BYTES and nbytes % PAGE_BYTES == 0:
        return None
    return f"is {nbytes} B, expected a multiple of the {PAGE_BYTES} B page"


def power_of_two(nbytes: int) -> str | None:
    """Refuse lines and pages that masking an address does not find."""
    return None if nbytes & (nbytes - 1) == 0 else f"is {nbytes} B, expected a power of two"


def power_of_two_of_them(count: int) -> str | None:
    """Refuse a number of entries of a ring that masking a counter does not find."""
    return None if count & (count - 1) == 0 else f"is {count}, expected a power of two"


def sets_fit(cache: int, ways: int, line: int) -> str | None:
    """Refuse a cache that is not a power of two of sets."""
    if line & (line - 1):
        return None  # said already
    sets, rest = divmod(cache, ways * line)
    if sets and not rest and sets & (sets - 1) == 0:
        return None
    return (
        f"is {size(cache)}, which in sets of {ways} lines of {line} B is no power of two of sets; "
        f"use {size(ways * line << max(sets.bit_length() - 1, 0))}"
    )


def write_buffer(dram: int, share: float, frame: int) -> int:
    """Return the bytes of the write buffer: its share of DRAM, in whole frames."""
    return int(dram * share) // frame * frame


def buffer_fits(share: float, dram: int, frame: int) -> str | None:
    """Refuse a write buffer that is larger than the DRAM, or below one frame."""
    buffer = int(dram * share)
    if share > 1:
        return f"is {share:g}: the write buffer ({size(buffer)}) is larger than DRAM ({size(dram)})"
    if buffer < frame:
        return f"is {share:g}: the write buffer ({size(buffer)}) is below one frame ({size(frame)})"
    return None


def batch_fits(batch: int, dram: int, share: float, frame: int) -> str | None:
    """Refuse a flush batch that the write buffer can never gather."""
    buffer = write_buffer(dram, share, frame)
    if batch <= buffer or buffer < frame:
        return None
    return f"is {size(batch)}, more than the write buffer ever holds ({size(buffer)})"


def reserve_fits(reserve: int, dram: int, share: float, frame: int, demands: int) -> str | None:
    """Refuse a DRAM without room for the demand reserve and one prefetch frame."""
    if share > 1:
        return None
    if reserve < demands * frame:
        return f"is {size(reserve)}, below one frame for each of {demands} outstanding demands"
    staging = dram - write_buffer(dram, share, frame)
    if staging >= reserve + frame:
        return None
    return (
        f"is {size(reserve)}: with one frame for prefetches ({size(frame)}) it needs more than "
        f"the DRAM beside the write buffer ({size(staging)} of {size(dram)}); lower it, or raise "
        "dram_capacity"
    )


def refill_divides(refill: int, granule: int) -> str | None:
    """Refuse a granule that is not made of whole refill units."""
    if granule % refill == 0:
        return None
    return f"is {size(refill)}, does not divide the cache granule ({size(granule)})"


def ways_fit(ways: int, dram: int, granule: int) -> str | None:
    """Refuse more ways than the cache has granules."""
    if ways <= dram // granule:
        return None
    return f"is {ways}, more than the {dram // granule} granules that the DRAM holds"
