"""Devices with tags and with bytes, and a promise for every test: all are at rest at its end."""

from __future__ import annotations

import pytest

from cxlbench.devices.cxl_hm import CxlHm
from tests.devices.cxl_hm_rig import HmRig


@pytest.fixture(autouse=True)
def nothing_is_held_at_the_end(monkeypatch):
    """Every device of a test must be at rest when the test is over (mutants excepted)."""
    devices = []
    original = CxlHm.__init__

    def make(self, *args, **options):
        original(self, *args, **options)
        if type(self) is CxlHm:
            devices.append(self)

    monkeypatch.setattr(CxlHm, "__init__", make)
    yield
    assert [device.at_rest() for device in devices if any(device.at_rest().values())] == []


@pytest.fixture(params=["phantom", "ram"])
def make_hm(request):
    """Make devices that hold tags, or real bytes in RAM."""
    made = []

    def make(*rules, **options):
        made.append(HmRig(*rules, phantom=request.param == "phantom", **options))
        return made[-1]

    yield make
    for rig in made:
        rig.clock.close()


@pytest.fixture
def hm(make_hm):
    return make_hm()
