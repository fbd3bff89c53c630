"""Objects named as ``module:object``: found, or refused with what may have been meant."""

from __future__ import annotations

import importlib
import sys

import pytest

from cxlbench.emu.user_objects import UserObjectError, load_callable

TEXT = "import math\nnumber = 3\ndef scenario(pod): return 7\ndef other(pod): ...\n"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_queue.py").write_text(TEXT)
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    (tmp_path / "users_package" / "queue_of_mine.py").write_text(TEXT)
    (tmp_path / "users_needing.py").write_text("import no_such_thing\n")
    (tmp_path / "users_failing.py").write_text("1 / 0\n")
    (tmp_path / "users_empty.py").write_text("")
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("name", ["users_queue", "users_package.queue_of_mine"])
def test_a_function_is_found(name):
    assert load_callable(f"{name}:scenario", what="scenario")(None) == 7


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("users_queu:scenario", "PYTHONPATH? did you mean users_queue?"),
        ("users_package.queue_of_min:x", "did you mean users_package.queue_of_mine?"),
        ("nothing_like_it_at_all:x", "is its folder on PYTHONPATH?"),
        ("users_queue:scenari", "has no object 'scenari'; did you mean scenario?"),
        ("users_queue", "say which object of the module, as users_queue:NAME; it has scenario"),
        ("users_queue:zzz", "has no object 'zzz'; it has scenario, other"),
        ("users_empty:x", "it defines nothing"),
        ("users_queue:number", "number is 3, not a class or function"),
        ("users_queue.py:scenario", "is a file: name its module, users_queue:scenario"),
        ("./users_queue.py", "is a file: name its module, users_queue:NAME"),
        ("/home/ann/users_queue.py:f", "is a file: name its module, users_queue:f"),
        ("./users_queue:f", "is a file: name its module, users_queue:f"),
        (".users_queue:f", "cannot import '.users_queue': write module:name"),
        ("", ": write module:name"),
        (":f", ": write module:name"),
        ("users queue:f", ": write module:name"),
    ],
)
def test_what_is_not_there_is_refused_with_what_may_be_meant(spec, said):
    with pytest.raises(UserObjectError) as raised:
        load_callable(spec, what="scenario")
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"scenario {spec!r}: ")


@pytest.mark.usefixtures("modules")
def test_an_import_that_fails_inside_the_module_blames_no_folder():
    with pytest.raises(UserObjectError, match="No module named 'no_such_thing'") as raised:
        load_callable("users_needing:x", what="scenario")
    assert "PYTHONPATH" not in str(raised.value)


@pytest.mark.usefixtures("modules")
def test_what_the_module_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        load_callable("users_failing:x", what="scenario")
