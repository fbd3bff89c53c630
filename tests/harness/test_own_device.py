"""A device that a user wrote, as docs/devices.md shows it, runs under the tier like any other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cxlbench.devices.profile import AcceleratorProfile, ExpanderProfile, load_as
from cxlbench.harness.engine import EngineModel
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.replay import ReplaySpec, replay
from cxlbench.harness.rig import RigSpec
from cxlbench.kv.geometry import model_shape

DOCS = Path(__file__).parents[2] / "docs/devices.md"


@pytest.fixture
def make():
    code = re.search(r"```python\n(# my_device.py.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    namespace: dict[str, object] = {"__name__": "my_device"}
    exec(compile(code[1], str(DOCS), "exec"), namespace)
    return namespace["make"]


def test_the_device_of_the_docs_is_right_and_two_milliseconds_slower(make):
    shape = model_shape("Llama-3.1-8B")
    workload = generate(GeneratorKnobs(sessions=3, turns=3, think_s=30, seed=1))

    def run(device):
        rig = RigSpec(device=device, block_bytes=shape.block_bytes(128), scale=64)
        engine = EngineModel(shape, load_as(AcceleratorProfile, "a100-80g"))
        spec = ReplaySpec(rig=rig, engine=engine, gpu_blocks=0, max_running=1, closed_loop=True)
        result = replay(workload, spec, wall=False)
        assert result.correct
        return [r.load_s - r.lookup_s for r in result.records if r.loaded]

    plain, sleepy = run(load_as(ExpanderProfile, "remote-dram")), run(make)
    assert len(sleepy) == len(plain) > 0
    for slow, fast in zip(sleepy, plain, strict=True):
        assert slow == pytest.approx(fast + 0.002, abs=1e-4)
