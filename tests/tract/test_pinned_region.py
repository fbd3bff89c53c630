"""A region pinned for a GPU, on a torch of the tests' own; and what happens where there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cxlbench.emu.pod_attachment import attached
from cxlbench.emu.pod_layout import PodShape
from cxlbench.emu.pod_processes import LivePod
from cxlbench.tract import pinned_region
from cxlbench.tract.pinned_region import (
    NotPinnedError,
    OutsideRegionError,
    PinnedRegion,
    find_torch,
)
from tests.tract.fake_torch import Tensor, Torch


class Pod:
    """The region of a live pod, pinned."""

    def __init__(self, live: LivePod, attachment: Any, torch: Torch) -> None:
        self.live, self.torch = live, torch
        self.address = attachment.region.address
        self.region = PinnedRegion(self.address, attachment.region.nbytes, torch=torch)


@pytest.fixture
def pod() -> Any:
    with LivePod(PodShape(4096)) as live, attached(live.paths, 0, 0) as attachment:
        pod = Pod(live, attachment, Torch())
        yield pod
        pod.region.close()


def test_the_mapping_is_registered_once_and_unregistered_at_the_end(pod: Pod) -> None:
    assert pod.region.pinned
    assert pod.region.reason == ""
    assert pod.torch.cuda.registered == {pod.address: (4096, pinned_region.REGISTER_PORTABLE)}
    pod.region.close()
    assert pod.torch.cuda.registered == {}
    pod.region.close()
    assert not pod.region.pinned


def test_a_block_goes_to_the_region_and_is_there_when_the_copy_is_complete(pod: Pod) -> None:
    copy = pod.region.start_write(64, Tensor(np.arange(8, dtype=np.float32).reshape(2, 4)))
    assert not copy.query()
    assert not pod.live.device.any()
    copy.synchronize()
    assert copy.query()
    assert pod.live.device.view(np.float32)[16:24].tolist() == list(range(8))


def test_a_block_comes_from_the_region_past_all_caches(pod: Pod) -> None:
    pod.live.memory(0).store(8, 7)  # in the node's cache only
    pod.live.device[2] = 5
    target = Tensor(np.zeros(3, dtype=np.int64))
    pod.region.start_read(0, target).synchronize()
    assert target.array.tolist() == [0, 0, 5]


def test_closing_waits_for_copies_under_way(pod: Pod) -> None:
    pod.region.start_write(0, Tensor(np.ones(1, dtype=np.int64)))
    pod.region.close()
    assert pod.live.device[0] == 1


@pytest.mark.parametrize(("off", "words"), [(-8, 1), (4096, 1), (4088, 2)])
def test_a_copy_that_would_leave_the_region_is_refused(pod: Pod, off: int, words: int) -> None:
    tensor = Tensor(np.ones(words, dtype=np.int64))
    for start in (pod.region.start_write, pod.region.start_read):
        with pytest.raises(OutsideRegionError, match="the region has 4096 B"):
            start(off, tensor)
    assert not pod.torch.cuda.queue


def test_a_tensor_with_gaps_is_refused(pod: Pod) -> None:
    with pytest.raises(OutsideRegionError, match="not contiguous"):
        pod.region.start_write(0, Tensor(np.ones(1), contiguous=False))


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (Torch(there=False), "torch finds no GPU"),
        (Torch(code=1), "of 4096 B failed with CUDA error 1"),
        (Torch(error="no driver"), "cudaHostRegister failed: no driver"),
        (object(), "torch does not work"),
    ],
)
def test_where_it_cannot_be_pinned_it_says_why_and_what_to_use(torch: Any, reason: str) -> None:
    memory = np.zeros(4096, np.uint8)
    with PinnedRegion(memory.ctypes.data, 4096, torch=torch) as region:
        assert not region.pinned
        assert reason in region.reason
        with pytest.raises(NotPinnedError, match=r"use the pod's DMA \(tract.transfer\)") as raised:
            region.start_write(0, Tensor(np.ones(1)))
        assert reason in str(raised.value)


def test_after_the_end_nothing_is_copied(pod: Pod) -> None:
    pod.region.close()
    with pytest.raises(NotPinnedError, match="it was closed"):
        pod.region.start_read(0, Tensor(np.ones(1)))


def test_torch_is_not_imported_where_it_is_not_installed(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_torch() == (None, "torch is not installed")


def test_a_broken_torch_is_a_reason(monkeypatch: Any) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so is not there")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", fail)
    assert find_torch() == (None, "torch does not work: libcudart.so is not there")


def test_importing_the_module_imports_no_torch() -> None:
    code = "import sys, cxlbench.tract.pinned_region; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
