"""Making wrong versions of TraCT: a change of its text, under a package name of its own.

A mutant is a substitution in the text of TraCT's programs. ``load`` writes the changed text under
a package name of its own and imports it, so that reports show the changed lines and the right code
stays as it is. Each mutant names the scenario that shows it and how: the kind of failure, and its
cause where the kind is a causality violation or a regress.

The mutants themselves are in ``mutants``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_failure import Kind

PACKAGE = "cxlbench.tract"

_FUTURE = "from __future__ import annotations\n"
# On the same line, so that line numbers stay those of the right code.
_IMPORTS = (
    "from __future__ import annotations; from cxlbench.emu.pod_ops import"
    " clflush, clflushopt, load, mfence, node_id, store\n"
)


class MutantError(ValueError):
    """A mutant's text to be replaced is not in its file exactly once."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong version: in ``file``, ``old`` becomes ``new``.

    ``kinds`` are the kinds of failure that are right for it, ``causes`` the right causes of a
    causality violation or a regress.
    """

    name: str
    file: str
    old: str
    new: str
    scenario: str
    kinds: tuple[Kind, ...]
    causes: tuple[Cause, ...] = ()

    @property
    def passed_over(self) -> tuple[Kind, ...]:
        """Kinds of failure to ignore, so that the right one is found."""
        return tuple(kind for kind in Kind if kind not in self.kinds)


def source_folder() -> Path:
    """Return the folder of TraCT's own text."""
    return Path(__file__).parent


def mutated(mutant: Mutant) -> dict[str, str]:
    """Return the text of all of TraCT's files with the mutant in it, by file name.

    Raises:
        MutantError: the text to replace is absent, or there more than once.

    """
    texts = {path.name: path.read_text() for path in sorted(source_folder().glob("*.py"))}
    found = texts[mutant.file].count(mutant.old)
    if found != 1:
        raise MutantError(f"{mutant.name}: {mutant.file} has {found} of {mutant.old!r}, not one")
    texts[mutant.file] = texts[mutant.file].replace(mutant.old, mutant.new)
    return texts


def load(mutant: Mutant, folder: Path) -> Callable[[Any], None]:
    """Write the mutant as a package into ``folder``, import it; return its scenario."""
    alias = "tract_mutant_" + re.sub(r"\W+", "_", mutant.name)
    home = folder / alias
    home.mkdir(parents=True, exist_ok=True)
    for name, text in mutated(mutant).items():
        changed = text.replace(f"from {PACKAGE}", f"from {alias}").replace(_FUTURE, _IMPORTS, 1)
        (home / name).write_text(changed)
    scenarios = _imported(alias, home)
    chosen: Callable[[Any], None] = getattr(scenarios, mutant.scenario)
    return chosen


def _imported(alias: str, home: Path) -> ModuleType:
    for name in [name for name in sys.modules if name.split(".")[0] == alias]:
        del sys.modules[name]
    importlib.invalidate_caches()
    spec = importlib.util.spec_from_file_location(
        alias, home / "__init__.py", submodule_search_locations=[str(home)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[alias] = package
    spec.loader.exec_module(package)
    return importlib.import_module(f"{alias}.scenarios")
