"""Conventions that hold for the whole Python face."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import kvrelay as kr
from kvrelay import _core, errors

PACKAGE = Path(kr.__file__).parent


def test_the_compiled_classes_are_frozen():
    for name, _ in inspect.getmembers(_core, inspect.isclass):
        sources = (PACKAGE.parents[1] / "rust/python/src").glob("*.rs")
        declared = [
            text
            for text in (path.read_text() for path in sources)
            if re.search(rf"pub\(crate\) struct {name}\b", text)
        ]
        assert declared and all(
            re.search(
                rf"#\[pyclass\(frozen[^\]]*\)\](?:\s*#\[[^\]]*\])*\s*pub\(crate\) struct {name}\b", text
            )
            for text in declared
        ), name


def test_every_export_is_used_by_the_package():
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in dir(_core):
        if not name.startswith("_"):
            assert re.search(rf"_core(\.| import [^\n]*\b){name}\b", sources), (
                f"{name} is exported and not used"
            )


def test_one_exception_tree():
    for name, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, Exception):
            assert issubclass(cls, kr.KvRelayError), name
            assert getattr(kr, name) is cls


def test_all_names_exist_and_are_documented():
    assert sorted(kr.__all__) == sorted(set(kr.__all__))
    for name in kr.__all__:
        item = getattr(kr, name)
        if inspect.isclass(item) or inspect.isfunction(item):
            assert item.__doc__, name


def test_the_stubs_name_every_export():
    stubs = (PACKAGE / "_core.pyi").read_text()
    for name in dir(_core):
        if not name.startswith("__"):
            assert re.search(rf"^(class|def) {name}\b", stubs, re.MULTILINE), name
