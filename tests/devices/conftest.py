"""Devices with tags and with bytes, and a promise for every test: all are at rest at its end."""

from __future__ import annotations

import pytest

from cxlbench.devices.cmm_h import CmmH
from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.devices.expander import Expander
from tests.devices.cxl_hm_rig import HmRig

KINDS = (CxlHm, CmmH, Expander)


@pytest.fixture(autouse=True)
def nothing_is_held_at_the_end(monkeypatch, request):
    """Every device of a test must be at rest when the test is over (mutants excepted)."""
    devices = []

    def watch(kind):
        original = kind.__init__

        def make(self, *args, **options):
            original(self, *args, **options)
            if type(self) is kind:
                devices.append(self)

        monkeypatch.setattr(kind, "__init__", make)

    for kind in KINDS:
        watch(kind)
    yield
    if "broken_on_purpose" in request.fixturenames:
        return
    assert [device.at_rest() for device in devices if any(device.at_rest().values())] == []


@pytest.fixture
def broken_on_purpose():
    """For a test that breaks a device and sees that this is noticed."""


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
