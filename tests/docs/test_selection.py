"""What `make check` leaves out and what `make guard` runs are files that exist."""

from __future__ import annotations

import re

from doc_pages import ROOT

TESTS = ROOT / "tests"


def test_listed_files_exist() -> None:
    listed = (TESTS / "long.txt").read_text().split()
    assert listed == sorted(set(listed))
    assert [name for name in listed if not (TESTS / name).is_file()] == []


def test_guards_name_tests_that_exist() -> None:
    source = (TESTS / "conftest.py").read_text()
    guards = [line.strip().strip('",') for line in source.splitlines() if line.startswith('    "') and "::" in line]
    assert len(guards) >= 8
    for guard in guards:
        name, _, test = guard.partition("::")
        found = (TESTS / name).read_text()
        assert test.rstrip(":").partition("[")[0] in found, guard
        assert "slow" in found, guard


def test_longest_tests_exist() -> None:
    listed = (TESTS / "longest.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    for line in listed:
        test = line.rpartition(" ")[0] if line[-1].isdigit() else line
        name, first, *_ = test.partition("[")[0].split("::")  # of a class the class: its tests may be inherited
        assert re.search(rf"^(def|class) {first}\b", (TESTS / name).read_text(), re.MULTILINE), test


def test_files_for_the_newest_vllm_exist() -> None:
    listed = re.search(r"NEXT_TESTS \?= ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text())
    assert listed is not None
    files = listed[1].replace("\\", " ").split()
    assert len(files) > 3
    assert not [name for name in files if not (ROOT / name).is_file()]
