"""What this host can feed: ``cxlbench calibrate``, and the check that wall runs make by it.

An emulated device at scale S moves 1/S of the bytes/s of its SSDs through real files, for real. So
the folder of the backing files is measured once (``fio`` if it is there, else a small probe of our
own with the same system calls as ``emu/backing.py``), and the figures are kept in a cache file. A
profile asks for reads and writes in any mixture: with read share f of the bytes, its SSDs move
T(f) = 1 / (f/R + (1-f)/W), the law of ``profile_kinds.py``. The host feeds it at scale S if it was
measured to move at least T(f)/S at every f measured.

Units: bytes, bytes/s, s of the host's clock. Left out: what the host's cores can copy and check
(the fidelity line at the end of a run tells), other users of the disk, sustained writes over
minutes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cxlbench.devices.profile import CmmHProfile, CxlHmProfile, ExpanderProfile, SsdProfile
from cxlbench.emu.status import HostLimitError
from cxlbench.harness import disk_probe
from cxlbench.harness.disk_probe import Pattern, Rate

PROBE_BYTES = 256 << 20
READ_SHARES = (1.0, 0.7, 0.5, 0.0)
LARGE, SMALL = 1 << 20, 4 << 10
SECONDS = 20.0
CACHE_VERSION = 1

Progress = Callable[[str, int, int], None]
DeviceProfile = CxlHmProfile | CmmHProfile | ExpanderProfile


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one folder's file system was measured to do.

    ``direct`` says whether the page cache was out of the way (O_DIRECT); if not, the figures are
    those of memory, and of little worth for runs larger than it.
    """

    place: str
    method: str
    direct: bool
    rates: tuple[Rate, ...]


def patterns(*, quick: bool = False) -> tuple[Pattern, ...]:
    """Return what is measured: 1 MiB and 4 KiB, sequential and random; if ``quick`` 1 MiB only."""
    kinds = (
        [(False, LARGE)]
        if quick
        else [(random, block) for block in (LARGE, SMALL) for random in (False, True)]
    )
    return tuple(Pattern(random, block, share) for random, block in kinds for share in READ_SHARES)


def calibrate(
    folder: Path,
    *,
    seconds: float = SECONDS,
    use_fio: bool = True,
    quick: bool = False,
    size_bytes: int = PROBE_BYTES,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Measure ``folder`` for about ``seconds``, each pattern for its share of them.

    fio measures each for 1 s at least. Needs ``size_bytes`` of free space (checked first; at least
    1 MiB) and leaves nothing behind. ``remember`` keeps the result.

    Raises:
        HostLimitError: there is no such folder, it cannot be written, is too full, or fio failed.
    """
    if not 0 < seconds < math.inf or size_bytes < LARGE:
        raise ValueError(
            f"seconds={seconds}, size_bytes={size_bytes}: seconds are above zero and finite, and "
            f"the file holds at least one block of {LARGE} B"
        )
    if not folder.is_dir():
        raise HostLimitError(f"{folder} is no folder: name one that is there, or make it first")
    wanted = patterns(quick=quick)
    with disk_probe.probe_file(folder, size_bytes) as file:
        if use_fio and (fio := disk_probe.find_fio()) is not None:
            method, run = "fio", disk_probe.fio_runner(fio, file, size_bytes)
        else:
            method, run = "built-in probe", disk_probe.built_in_runner(file, size_bytes)
        rates = []
        for number, pattern in enumerate(wanted):
            progress(f"calibrating by {method}", number, len(wanted))
            rates.append(run(pattern, seconds / len(wanted)))
        direct = disk_probe.is_direct(file)
    return Calibration(place_of(folder), method, direct, tuple(rates))


# -- the cache file ------------------------------------------------------------------------------


class _Cache(msgspec.Struct):
    version: int = CACHE_VERSION
    places: dict[str, Calibration] = msgspec.field(default_factory=dict)


def cache_file() -> Path:
    """Return where calibrations are remembered (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "cxlbench" / "calibration.json"


def place_of(folder: Path) -> str:
    """Return what tells one file system of this host from another: device number and id."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    try:
        device, system = there.stat().st_dev, os.statvfs(there)
    except OSError as error:
        raise HostLimitError(f"cannot look at {there}: {error.strerror}") from error
    return f"{os.uname().nodename} {os.major(device)}:{os.minor(device)} {system.f_fsid:x}"


def remembered(folder: Path) -> Calibration | None:
    """Return the calibration of the file system that ``folder`` is on; None if there is none."""
    return _load().places.get(place_of(folder))


def remember(found: Calibration) -> Path:
    """Keep a calibration for later runs, and return the file.

    Raises:
        HostLimitError: the file cannot be written.
    """
    cache = _load()
    cache.places[found.place] = found
    path = cache_file()
    unfinished = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(cache)) + b"\n")
        unfinished.replace(path)
    except OSError as error:
        raise HostLimitError(
            f"not remembered: {path} cannot be written ({error.strerror or error}); runs will not "
            "know of this calibration: set XDG_CACHE_HOME to a folder that can be"
        ) from error
    return path


def _load() -> _Cache:
    try:
        cache = msgspec.json.decode(cache_file().read_bytes(), type=_Cache)
    except (OSError, msgspec.MsgspecError):
        return _Cache()
    return cache if cache.version == CACHE_VERSION else _Cache()


# -- what a profile asks of the host --------------------------------------------------------------


def required_scale(profile: DeviceProfile, host: Calibration, *, devices: int = 1) -> float:
    """Return the scale from which on ``host`` can feed ``devices`` of a full-size ``profile``.

    1 where the host keeps up at full size, and for a device without SSDs; infinity where the host
    moved nothing under some pattern.
    """
    if isinstance(profile, ExpanderProfile):
        return 1.0
    scale = 1.0
    for rate in host.rates:
        if rate.pattern.block_bytes != LARGE:
            continue  # devices move whole objects
        asked = devices * profile.ssd_count * mixed_bandwidth(profile.ssd, rate.pattern.read_share)
        scale = max(scale, asked / rate.bytes_per_s if rate.bytes_per_s else math.inf)
    return scale


def mixed_bandwidth(ssd: SsdProfile, read_share: float) -> float:
    """Return the bytes/s of an SSD whose traffic is ``read_share`` reads, by bytes."""
    return 1 / (read_share / ssd.read_bandwidth + (1 - read_share) / ssd.write_bandwidth)


def fitting_scale(scale: float) -> float:
    """Round up to a power of two: such scales keep 2 MiB frames exact."""
    return scale if not math.isfinite(scale) else float(1 << max(0, math.ceil(math.log2(scale))))


def check_host_feeds(
    profile: DeviceProfile, scale: float, folder: Path, *, devices: int = 1
) -> Calibration | None:
    """Refuse a wall-clock run that the file system of ``folder`` was measured not to feed.

    Returns the calibration that the answer rests on, None if there is none yet (nothing is measured
    here: a run that the host does not keep up with is marked at its end anyway).

    Raises:
        HostLimitError: it cannot; the message has the scale that would fit.
    """
    host = remembered(folder)
    if host is None:
        return None
    needed = required_scale(profile, host, devices=devices)
    if needed > scale:
        raise HostLimitError(
            f"{folder} cannot feed {devices} x {profile.name} at scale {scale:g}: by its "
            f"calibration ({host.method}) it needs scale {needed:.1f} or more; use --scale "
            f"{fitting_scale(needed):g}, another folder, or calibrate again if the host has changed"
        )
    return host


def check_room(capacity_bytes: Sequence[int], folder: Path, *, scale: float) -> None:
    """Refuse backing files that are larger than the free space of ``folder``.

    ``capacity_bytes`` are the full-size capacities of the devices. Files are sparse and may end up
    smaller, but a run must not fill the disk.

    Raises:
        HostLimitError: they are; the message has the scale that would fit.
    """
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    try:
        room = os.statvfs(there)
    except OSError as error:
        raise HostLimitError(f"cannot look at {there}: {error.strerror}") from error
    free = room.f_bavail * room.f_frsize
    total = sum(capacity_bytes)
    if total / scale > free:
        raise HostLimitError(
            f"the devices are larger than the disk: {total / scale / 2**30:.1f} GiB of backing "
            f"files at scale {scale:g}, {free / 2**30:.1f} GiB are free in {there}; use --scale "
            f"{fitting_scale(total / free) if free else math.inf:g}, a smaller --capacity, or "
            "another --folder"
        )
