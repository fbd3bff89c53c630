"""TraCT's own code under the explorer: quiet, whatever the schedule, evictions and crashes."""

from __future__ import annotations

import pytest

from cxlbench.emu.pod_explorer import explore
from cxlbench.tract.scenarios import ALL

SCHEDULES = 100


@pytest.mark.parametrize("name", ALL)
def test_right_code_is_quiet(name: str) -> None:
    found = explore(ALL[name], schedules=SCHEDULES, scheduler="mixed", shrinking=False)
    assert not found.failed, str(found.report)
    assert found.schedules == SCHEDULES


def test_a_thousand_schedules_are_explored() -> None:
    assert SCHEDULES * len(ALL) >= 1000
