"""``cxlbench pod fsck``: a sound region, a damaged one, and files that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_processes import LivePod
from cxlbench.tract.layout import Sizes, plan
from cxlbench.tract.region import format_region

SIZES = Sizes(nodes=2, slots=64, chunks=64, chunk_bytes=4096)


@pytest.fixture(scope="module")
def region(tmp_path_factory):
    path = tmp_path_factory.mktemp("fsck") / "pod.region"
    layout = plan(SIZES)
    nbytes = -(-layout.region_bytes // 4096) * 4096
    path.write_bytes(bytes(nbytes))
    with LivePod(PodShape(region_bytes=nbytes, nodes=1, mode="native"), region=path) as pod:
        format_region(pod.memory(0), SIZES, nbytes)
    return path


def test_a_fresh_region_is_sound(cli, region):
    ran = cli("pod", "fsck", str(region), "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert report["sound"]
    assert report["free"] == report["chunks"] > 0


def test_a_damaged_list_is_told(cli, region, tmp_path):
    damaged = tmp_path / "damaged.region"
    words = np.frombuffer(region.read_bytes(), dtype=np.int64).copy()
    layout = plan(SIZES)
    words[(layout.cache_at) // 8] = 5
    damaged.write_bytes(words.tobytes())
    ran = cli("pod", "fsck", str(damaged))
    assert ran.code == 1
    assert "WRONG" in ran.out


@pytest.mark.parametrize("content", [b"\0" * 65536, b"x" * 65536])
def test_what_is_no_region_is_refused_in_words(cli, tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    ran = cli("pod", "fsck", str(path))
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert str(path) in ran.err
