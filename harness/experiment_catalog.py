"""Finds experiments: those of cxlbench, of installed projects, and one named by ``module:object``.

Entry points of the group ``cxlbench.experiments`` name a package (each of its modules with an
``EXPERIMENT``) or a module. A module that cannot be imported hides nothing but itself: the catalog
lists it with its error, and asking for it raises that error.

No units here.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from cxlbench.harness.experiment import Experiment, ExperimentError

GROUP = "cxlbench.experiments"
OBJECT = "EXPERIMENT"
ALL = "all"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of experiments are names of folders, too."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A module of experiments that cannot be used: its name, what it is a part of, and why."""

    name: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"experiment {self.name!r} ({self.where}) cannot be used: {self.why}"


@dataclass(frozen=True, slots=True)
class Catalog:
    """All experiments by name, in the order in which they are listed, and what is broken."""

    experiments: Mapping[str, Experiment]
    broken: tuple[Broken, ...] = ()

    def get(self, name: str) -> Experiment:
        """Return an experiment by its name or as ``module:object``.

        Raises:
            ExperimentError: there is none, with the nearest names; or its module is broken.
        """
        if ":" in name:
            return _named_object(name)
        if name in self.experiments:
            return self.experiments[name]
        for broken in self.broken:
            if name == broken.name:
                raise ExperimentError(str(broken))
        possible = [*self.experiments, *(broken.name for broken in self.broken)]
        otherwise = f"there are {', '.join(possible) or 'none'}; `cxlbench list` shows them"
        raise ExperimentError(
            f"there is no experiment {name!r}; {nearest(name, possible, otherwise=otherwise)}"
        )

    def choose(self, names: Sequence[str]) -> list[Experiment]:
        """Return the experiments of ``names``, each once, in that order; ``all`` is all of them."""
        found: dict[str, Experiment] = {}
        for name in names:
            some = self.experiments.values() if name == ALL else [self.get(name)]
            for experiment in some:
                found.setdefault(experiment.name, experiment)
        return list(found.values())


def nearest(name: str, possible: Iterable[str], *, otherwise: str) -> str:
    """Return a hint at the names that ``name`` may have been meant for, or ``otherwise``."""
    close = difflib.get_close_matches(name, list(possible), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def find_experiments(points: Iterable[EntryPoint] | None = None) -> Catalog:
    """Return all experiments of ``points``: by default, of every installed project."""
    chosen = entry_points(group=GROUP) if points is None else points
    experiments: dict[str, Experiment] = {}
    taken: dict[str, str] = {}
    broken: list[Broken] = []
    for point in sorted(set(chosen), key=lambda point: (point.name != "builtin", point.name)):
        for found in _of_point(point):
            if isinstance(found, Broken):
                broken.append(found)
                continue
            where, experiment = found
            if experiment.name in taken:
                why = f"its name is that of {taken[experiment.name]}; rename one of them"
                broken.append(Broken(experiment.name, where, why))
                continue
            experiments[experiment.name] = experiment
            taken[experiment.name] = where
    return Catalog(experiments, tuple(broken))


def _of_point(point: EntryPoint) -> Iterator[tuple[str, Experiment] | Broken]:
    """Yield what an entry point leads to: experiments with their modules, and what is broken."""
    try:
        found = point.load()
    except (Exception, SystemExit) as error:
        # Whatever a module of the user's does when it is imported, the others are shown.
        yield Broken(point.name, point.value, _why(error))
        return
    if not isinstance(found, ModuleType):
        yield _checked(found, name=point.name, where=point.value)
        return
    if hasattr(found, OBJECT):
        yield _checked(getattr(found, OBJECT), name=point.name, where=point.value)
    elif not hasattr(found, "__path__"):
        yield Broken(point.name, point.value, f"it has no {OBJECT}")
    for info in sorted(pkgutil.iter_modules(getattr(found, "__path__", ())), key=lambda i: i.name):
        where = f"{found.__name__}.{info.name}"
        try:
            module = importlib.import_module(where)
        except (Exception, SystemExit) as error:
            yield Broken(info.name, where, _why(error))
            continue
        if hasattr(module, OBJECT):
            yield _checked(getattr(module, OBJECT), name=info.name, where=where)


def _checked(found: object, *, name: str, where: str) -> tuple[str, Experiment] | Broken:
    if not isinstance(found, Experiment):
        return Broken(name, where, f"{OBJECT} is of type {type(found).__name__}, not Experiment")
    if not NAME.fullmatch(found.name) or found.name == ALL:
        why = f"its name {found.name!r} must be letters, digits, '_', '.' and '-', and not {ALL!r}"
        return Broken(name, where, why)
    return where, found


def _named_object(spec: str) -> Experiment:
    module_name, _, object_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ExperimentError as error:
        raise ExperimentError(f"experiment {spec!r}: {error}") from error
    except (ImportError, ValueError) as error:
        raise ExperimentError(
            f"experiment {spec!r}: cannot import {module_name!r} ({error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    found = getattr(module, object_name or OBJECT, None)
    if found is None:
        names = [name for name, value in vars(module).items() if isinstance(value, Experiment)]
        hint = f"it has {', '.join(names)}" if names else "it has no Experiment at all"
        raise ExperimentError(
            f"experiment {spec!r}: {module_name!r} has no {object_name!r}; {hint}"
        )
    checked = _checked(found, name=object_name, where=spec)
    if isinstance(checked, Broken):
        raise ExperimentError(str(checked))
    return checked[1]


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
