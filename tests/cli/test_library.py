"""`ctxwin library` and `ctxwin store export|import`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli.test_main import invoke, refused
from ctxwin import Library, open_store


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "notes.txt").write_text("a red car")
    Image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save(tmp_path / "shot.png")
    return tmp_path / "notes.txt", tmp_path / "shot.png"


def test_files_go_in_are_listed_and_leave(tmp_path: Path, files: tuple[Path, Path]) -> None:
    store = tmp_path / "kv"
    made = invoke("library", "add", store, "shelf", *files, "--ttl", 60, "--json")
    assert [a["name"] for a in json.loads(made.stdout)["added"]] == ["notes.txt", "shot.png"], made.output
    assert invoke("library", "ls", store).stdout.split() == ["shelf"]
    rows = json.loads(invoke("library", "ls", store, "shelf", "--json").stdout)["files"]
    assert [r["name"] for r in rows] == ["notes.txt", "shot.png"] and all(r["expires"] for r in rows)
    assert "expires in" in invoke("library", "ls", store, "shelf").stdout
    refused(
        invoke("library", "add", store, "shelf", files[0]), "notes.txt", "replace it", "0 of 1 were added; --replace"
    )
    assert invoke("library", "add", store, "shelf", files[0], "--replace").exit_code == 0
    assert invoke("library", "rm", store, "shelf", "shot.png").exit_code == 0
    refused(invoke("library", "rm", store, "shelf", "shot.png"), "shot.png")
    refused(invoke("library", "rm", store, "shelf"), "files or --all")
    assert invoke("library", "rm", store, "shelf", "--all").exit_code == 0
    assert invoke("library", "ls", store).stdout == ""


def test_a_library_travels_as_a_file(tmp_path: Path, files: tuple[Path, Path]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    invoke("library", "add", here, "shelf", *files, "--tenant", "acme")
    assert invoke("library", "export", here, "shelf", tmp_path / "a.ctxwin", "--tenant", "acme").exit_code == 0
    assert invoke("library", "import", there, "copy", tmp_path / "a.ctxwin").stdout.split() == ["notes.txt", "shot.png"]
    refused(invoke("library", "import", there, "copy", tmp_path / "a.ctxwin"), "replace it")
    refused(invoke("library", "import", there, "copy", files[1]), "must be a whole file that")
    refused(invoke("library", "ls", here, "shelf"), "no store without a tenant")


def test_grants_are_given_and_taken(tmp_path: Path, files: tuple[Path, Path]) -> None:
    from ctxwin.library.library import granted_libraries

    invoke("library", "add", tmp_path / "kv", "shelf", files[0])
    for arguments, wanted in (((), ("shelf",)), (("--revoke",), ())):
        assert invoke("library", "grant", tmp_path / "kv", "shelf", "acme", *arguments).exit_code == 0
        store = open_store(f"disk:{tmp_path / 'kv'}")
        assert granted_libraries(store, "acme") == wanted
        store.close()
    refused(
        invoke("library", "grant", tmp_path / "kv", "shelf", "carol", "--revoke"), "got 'carol', which had no grant"
    )
    refused(invoke("library", "grant", tmp_path / "kv", "shelf", ""), "tenant must be a name, got ''")


def test_a_store_is_carried_over(tmp_path: Path, files: tuple[Path, Path]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    invoke("library", "add", here, "shelf", *files)
    wrote = json.loads(invoke("store", "export", here, tmp_path / "all.ctxwin", "--json").stdout)
    took = invoke("store", "import", there, tmp_path / "all.ctxwin", "--json")
    assert json.loads(took.stdout) == {"stored": wrote["items"], "there": 0, "refused": 0}
    assert "were there" in invoke("store", "import", there, tmp_path / "all.ctxwin").stdout
    store = open_store(f"disk:{there}")
    assert sorted(Library(store, "shelf").view().names) == ["notes.txt", "shot.png"]
    store.close()
    assert (
        json.loads(invoke("store", "export", here, tmp_path / "s.ctxwin", "--kind", "source", "--json").stdout)["items"]
        == 1
    )
    refused(invoke("store", "export", tmp_path / "gone", tmp_path / "x.ctxwin"), "existing folder")
    assert not (tmp_path / "x.ctxwin").exists()


@pytest.mark.parametrize("command", ["ls", "rm --all", "export FILE", "grant acme"])
def test_a_library_that_is_not_there_is_refused(command: str, tmp_path: Path, files: tuple[Path, Path]) -> None:
    invoke("library", "add", tmp_path / "kv", "shelf", files[0])
    file = tmp_path / "a.ctxwin"
    file.write_text("an older export")
    name, *rest = command.replace("FILE", str(file)).split()
    refused(invoke("library", name, tmp_path / "kv", "shelv", *rest), "one of the store's (shelf), got 'shelv'")
    assert file.read_text() == "an older export"
    assert invoke("library", "ls", tmp_path / "kv").stdout.split() == ["shelf"]


def test_what_is_refused_makes_no_store(tmp_path: Path, files: tuple[Path, Path]) -> None:
    wrong = tmp_path / "a\\b.txt"
    wrong.write_text("a")
    refused(invoke("library", "add", tmp_path / "kv", "no/name", files[0]), "a library's name must be")
    refused(invoke("library", "add", tmp_path / "kv", "shelf", files[0], wrong), "a file's name must be")
    assert not (tmp_path / "kv").exists()


def test_the_export_of_a_library_is_no_stores(tmp_path: Path, files: tuple[Path, Path]) -> None:
    invoke("library", "add", tmp_path / "here", "shelf", *files)
    invoke("library", "export", tmp_path / "here", "shelf", tmp_path / "a.ctxwin")
    refused(invoke("store", "import", tmp_path / "kv", tmp_path / "a.ctxwin"), "use ctxwin library import")
    assert json.loads(invoke("store", "stats", tmp_path / "kv", "--json").stdout)["items"] == 0
