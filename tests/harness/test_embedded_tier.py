"""HyMCache inside an engine's process: what the adapter's configuration builds, and that it holds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.harness.embedded_tier import KNOWN, build
from cxlbench.kv.connector import held
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.results import KeyResult
