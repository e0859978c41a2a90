from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import system
from ctxwin.cli.main import app
from ctxwin_evals.report import Run, markdown, page, read_runs, rich_tables, write_report
from ctxwin_evals.report.figures import pictures, render
from ctxwin_evals.report.tables import arm_table, official_table
from ctxwin_evals.samples import open_samples
from eval_rows import CONFIG, Words, row, sweep, unserved

ODD = "<script>alert(1)</script> & \"quoted\" | 'pipe' $x_$"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """What stands in a page, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._table: list[list[str]] = []
        self._text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = []
        if tag == "tr":
            self._table.append([])
        if tag in ("td", "th", "caption"):
            self._text = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"{tag} closes {self.open[-1:]}"
        self.open.pop()
        if tag in ("td", "th"):
            self._table[-1].append(self._text.strip())
        if tag == "caption":
            self.tables[self._text.strip()] = self._table

    def handle_data(self, data: str) -> None:
        self._text += data


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; the first has everything that a report can show, the second an odd name and clusters."""
    root = tmp_path_factory.mktemp("runs")
    for name, per_cluster, label in (("one", 1, "plain"), ("two", 3, ODD)):
        with open_samples(root / name, CONFIG | {"name": label, "kv": name}) as samples:
            rows = sweep(21, per_cluster=per_cluster, seed=per_cluster)
            plain = {"meta": {}, "by_layer": None}
            samples.add(rows if name == "one" else [r.model_copy(update=plain) for r in rows])
            samples.add(
                [unserved("orbit:2", 0), row("orbit:2", 1, orders=3, meta={}), row("blind", 0, task="made/control")]
            )
    return [root / "one", root / "two"]


@pytest.fixture(scope="module")
def written(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(folders, tmp_path_factory.mktemp("report"), task_of=Words)


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> list[Run]:
    return read_runs(folders, task_of=Words)


def test_the_page_is_whole_and_needs_nothing_else(written: Path) -> None:
    text = written.read_text()
    made = Page(text)
    for tag, attributes in made.tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/", "#")), (tag, name, value)
        assert not any(name.startswith("on") for name in attributes), attributes
    assert "@import" not in text and "url(" not in text
    assert not re.search(r"""["'(]https?:""", text)
    images = [attributes for tag, attributes in made.tags if tag == "img"]
    assert len(images) == 2 + 3 + 1  # arms of both tasks; bytes, layers and grid of the first run, bytes of the second
    for image in images:
        assert image["alt"]
        svg = base64.b64decode((image["src"] or "").removeprefix("data:image/svg+xml;base64,"))
        assert svg.startswith(b"<?xml") and b"</svg>" in svg
    anchors = {attributes["href"] for tag, attributes in made.tags if tag == "a"}
    assert anchors == {f"#{attributes['id']}" for tag, attributes in made.tags if tag == "section"}


def test_odd_names_are_text_everywhere(written: Path, runs: list[Run]) -> None:
    text = written.read_text()
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    page_rows = Page(text).tables["made/words: words"]
    assert any(cells[0] == ODD for cells in page_rows)
    document = (written.parent / "report.md").read_text()
    assert "<script>" not in document
    assert "'pipe' $x_$" in document and "\\| 'pipe'" in document
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    odd = {**runs[0].result, "arms": {"[bold]x": runs[0].result["arms"]["blind"]}}
    for table in rich_tables(odd):
        console.print(table)
    assert "[bold]x" in console.export_text()


def test_a_narrow_terminal_loses_no_figure(runs: list[Run]) -> None:
    from rich.console import Console

    tables = rich_tables(runs[0].result)
    texts = []
    for width in (40, 300):
        console = Console(width=width, record=True, file=io.StringIO())
        for table in tables:
            console.print(table, crop=False)
        texts.append([line.rstrip() for line in console.export_text().splitlines()])
    assert texts[0] == texts[1] and max(map(len, texts[0])) > 80 and any("flips back" in line for line in texts[0])


def test_unread_answers_are_counted_beside_what_leaves_them_out(tmp_path: Path) -> None:
    """Blind reuse turns all right answers but one into babble: a mean of one item is no mean of all."""
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", i, "red" if i == 0 else "the the") for i in range(9)] + [row("reprefill", 0)])
    note = arm_table(read_runs([tmp_path], task_of=Words), "made/words").note
    assert note == "In neither accuracy nor harm, since the task's rule could not read them: blind (8 of 9)."


def test_tables_say_which_factors_patches_have(runs: list[Run]) -> None:
    def note(layout: str) -> str:
        config = runs[0].result["config"] | {"layout": layout}
        return arm_table([Run("", Path(), {**runs[0].result, "config": config})], "made/words").note

    assert "patched:M has joint factors of rank M; windows serve quantized ones" in note("joint")
    assert "factors" not in note("quantized")


def figures_of(run: Run, arm: str) -> dict[str, Any]:
    return dict(run.arms("made/words")[arm])


def test_the_page_shows_the_scored_figures(written: Path, runs: list[Run]) -> None:
    tables = Page(written.read_text()).tables
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for title in ("made/words: words", "made/words: more figures"):
        heads, *rows = tables[title]
        for cells in rows:
            shown.setdefault((cells[0], cells[1]), {}).update(zip(heads, cells, strict=True))
    assert tables["made/words: words"][0][1:6] == ["arm", "n", "accuracy [95 %]", "harm", "bytes"]
    assert len(shown) == sum(len(run.arms("made/words")) for run in runs)
    for run in runs:
        for arm in run.arms("made/words"):
            f, cells = figures_of(run, arm), shown[run.label, arm]
            assert cells["n"] == str(f["n"])
            low, high = f["ci95"]
            assert cells["accuracy [95 %]"] == f"{f['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
            assert cells["harm"] == f"{f['harm_rate']:.1%}"
            assert cells["bytes"] == ("-" if f["bytes_share"] is None else f"{f['bytes_share']:.1%}")
            assert float(cells["eta [95 %]"].split()[0]) == pytest.approx(f["eta"], abs=6e-4)
            assert float(cells["KL [95 %]"].split()[0]) == pytest.approx(f["kl"], abs=6e-4)
    assert shown["plain", "orbit:2"]["left out"] == "1 + 0"
    assert shown["plain", "blind"]["clusters"] == "21" and shown[ODD, "blind"]["clusters"] == "7"
    assert all(
        "first token" not in cells and "KL of answers" not in cells for cells in shown.values()
    )  # nobody has them


def test_differences_and_matched_bytes_are_shown(written: Path, runs: list[Run]) -> None:
    tables = Page(written.read_text()).tables
    against = {run.label: run.result["paired"]["made/words"]["against"] for run in runs}
    (title,) = (t for t in tables if t.startswith("made/words: each arm minus"))
    rows = {(cells[0], cells[1]): cells for cells in tables[title][1:]}
    pair = runs[0].result["paired"]["made/words"]["arms"]["blind"]
    assert rows["plain", "blind"][2] == against["plain"]
    assert rows["plain", "blind"][4].startswith(f"{pair['accuracy']:+.3f} [")
    assert rows["plain", "blind"][7] != "-" and rows[ODD, "blind"][7] == "-"  # McNemar needs independent items
    matched = tables["made/words: patches minus token arms at equal bytes"][1:]
    assert len(matched) == sum(len(run.result["matched"]["made/words"]) for run in runs) == 6
    assert matched[1][1:5] == ["patched:4", "4.0%", "first_k", "first_k:2 2.0% and first_k:6 6.0%"]
    official = tables["made/words: the data set's own figures"]
    assert dict(zip(*official, strict=True))["plain: blind"] == "0.000"
    assert official[0][0] == "figure" and [line[0] for line in official[1:]] == ["strict"]
    assert ["plain", "orbit:2", "3.000"] in tables["made/words: the arms' own figures, means"]
    assert tables["made/words: accuracy by number of placed chunks"][0] == ["run", "arm", "2 chunks", "3 chunks"]
    settings = {cells[0]: cells[1:] for cells in tables["Configuration"]}
    assert settings["kv"] == ["one", "two"]
    assert "The runs differ in kv, name." in written.read_text()


def test_markdown_holds_the_same_figures(written: Path, runs: list[Run]) -> None:
    text = (written.parent / "report.md").read_text()
    f = figures_of(runs[0], "patched:4")
    line = next(x for x in text.splitlines() if x.startswith("| plain | patched:4 | 21 |"))
    assert f"| {f['accuracy']:.3f} [{f['ci95'][0]:.3f}, {f['ci95'][1]:.3f}] |" in line
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (written.parent / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(list((written.parent / "figures").glob("*.png"))) == text.count("](figures/") == 6
    alone = markdown(runs[:1])
    assert "| patched:4 | 21 |" in alone
    assert all(line.count("|") == alone.splitlines()[i - 1].count("|") for i, line in enumerate(alone.splitlines())
               if line.startswith("| ---"))  # fmt: skip


def test_caveats_depend_on_the_runs(runs: list[Run], tmp_path: Path) -> None:
    text = page(runs, {})
    for words in (
        "Negative controls",
        "fewer than 100 items",
        "counted apart",
        "cluster-robust, and McNemar",
        "flattered",
    ):
        assert words in text
    assert "no evidence about pretrained models" not in text
    from ctxwin_evals.tasks import open_task

    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", i, task="tiny/multi_hop") for i in range(100)])
    tiny = page(read_runs([tmp_path], task_of=open_task), {})
    assert "no evidence about pretrained models" in tiny
    for words in ("Negative controls", "fewer than 100", "counted apart", "McNemar", "flattered"):
        assert words not in tiny.partition("<nav")[0], words


def test_a_run_with_little_to_show_is_a_report_too(tmp_path: Path) -> None:
    with open_samples(tmp_path / "run", CONFIG) as samples:
        samples.add(
            [row("blind", 0, "two words", kl=0.0, base_kl=0.0), row("blind", 1, "two words", kl=0.0, base_kl=0.0)]
        )
    path = write_report([tmp_path / "run"], task_of=Words)
    assert path == tmp_path / "run" / "report.html"
    text = path.read_text()
    heads, cells = Page(text).tables["made/words: words"]
    assert heads == ["arm", "n", "accuracy [95 %]", "bytes", "computed", "KL", "flips back"], "no column is empty"
    assert cells[:3] == ["blind", "2", "-"]
    assert "In neither accuracy nor harm, since the task&#39;s rule could not read them: blind (2 of 2)." in text
    assert [p.name for p in sorted((tmp_path / "run" / "figures").iterdir())] == ["01-made-words-arms.png"]


def test_figures_of_an_earlier_report_do_not_stand_beside_this_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    poor = [row("blind", 0)]
    for name, rows in (("rich", [*poor, row("patched:1", 0, by_layer=[0.0, 0.5, 1.0])]), ("poor", poor)):
        with open_samples(tmp_path / name, CONFIG) as samples:
            samples.add(rows)
        write_report([tmp_path / name], out, task_of=Words)
        figures = {path.name for path in (out / "figures").iterdir()}
        assert ("01-made-words-layers.png" in figures) == (name == "rich")
        (out / "figures" / "mine.png").write_bytes(b"")
    assert figures == {"01-made-words-arms.png", "mine.png"}


def test_the_line_of_reprefill_stands_on_as_many_items_as_there_are(tmp_path: Path) -> None:
    """The first arm served one item, which re-prefill gets wrong."""
    rows = [row("orbit:8", 0, reference="blue"), *(unserved("orbit:8", i) for i in range(1, 10))]
    rows += [row("reprefill", i, reference="blue" if i == 0 else "red", recomputed=1.0) for i in range(10)]
    rows += [
        row(f"patched:{m}", i, reference="blue" if i == 0 else "red", stored=10 * m) for m in (1, 8) for i in range(10)
    ]
    with open_samples(tmp_path / "run", CONFIG) as samples:
        samples.add(rows)
    made = read_runs([tmp_path / "run"], task_of=Words)
    left = next(p for p in pictures(made, "made/words") if p.name == "bytes").figure.axes[0]
    drawn = {line.get_label(): float(line.get_ydata()[0]) for line in left.lines if line.get_linestyle() == "--"}
    assert drawn["re-prefill"] == pytest.approx(0.9)


def test_the_command_prints_paths_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]run[/]"
    with open_samples(folder, CONFIG) as samples:
        samples.add([row("blind", 0, task="tiny/multi_hop")])
    made = CliRunner().invoke(app, ["eval", "report", str(folder)])
    assert made.exit_code == 0, made.output
    assert f"wrote {folder / 'report.html'}" in made.stdout
    made = CliRunner().invoke(app, ["eval", "score", str(folder)])
    assert made.exit_code == 0 and "[bold]run[/]" in made.stdout


def test_a_run_that_cannot_be_written_is_scored(tmp_path: Path) -> None:
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", 0, task="tiny/multi_hop")])
    (tmp_path / "lm-eval").write_bytes(b"")  # no folder can be made
    made = CliRunner().invoke(app, ["eval", "score", str(tmp_path)])
    assert made.exit_code == 0 and "accuracy" in made.stdout
    assert "lm-eval's files are left as they are: " in made.stderr


def test_what_all_tasks_share_is_said_once(tmp_path: Path) -> None:
    tasks = {"made/words": {"seed": 3, "frames": [2, 4]}, "made/other": {"seed": 3, "frames": [2]}}
    with open_samples(tmp_path, CONFIG | {"tasks": tasks}) as samples:
        samples.add([row("blind", 0)])
    settings = dict(map(tuple, Page(page(read_runs([tmp_path], task_of=Words), {})).tables["Configuration"]))
    assert settings["tasks.*.seed"] == "3"
    assert (settings["tasks.made/words.frames"], settings["tasks.made/other.frames"]) == ("2, 4", "2")
    assert "tasks.made/other.seed" not in settings


def test_the_same_runs_give_the_same_figures(runs: list[Run]) -> None:
    once, again = ([render(p.figure, "svg") for p in pictures(runs[:1], "made/control")] for _ in range(2))
    assert once == again


def test_runs_are_told_apart_or_refused(folders: list[Path], tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        with open_samples(tmp_path / name, CONFIG) as samples:
            samples.add([row("blind", 0)])
    labels = [run.label for run in read_runs([tmp_path / "a/run", tmp_path / "b/run"], task_of=Words)]
    assert labels == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]
    assert [run.label for run in read_runs([tmp_path / "a/run"], task_of=Words)] == ["run"]
    with pytest.raises(ValueError, match="named once each"):
        read_runs([folders[0], folders[0]], task_of=Words)
    with pytest.raises(ValueError, match="at least one run"):
        read_runs([])
    with pytest.raises(ValueError, match=r"config\.json"):
        write_report([tmp_path / "nothing"], task_of=Words)


def test_tables_need_no_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import ctxwin_evals.report; print('fine')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": ":".join(p for p in sys.path if p)})  # fmt: skip
    assert made.stdout == "fine\n", made.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with system.chromium() as opened:
        yield opened


@pytest.mark.browser
def test_in_a_browser_columns_sort_and_nothing_is_fetched(browser: Any, written: Path) -> None:
    view = browser.new_page()
    asked: list[str] = []
    said: list[str] = []
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: said.append(message.text))
    view.goto(written.as_uri())
    assert [url for url in asked if not url.startswith("data:")] == [written.as_uri()]
    assert not said
    table = view.locator("section table").first
    at = table.locator("th").all_inner_texts().index("accuracy [95 %]")
    head = table.locator("th").nth(at)

    def column() -> list[float]:
        return [float(text.split()[0]) for text in table.locator(f"tbody td:nth-child({at + 1})").all_inner_texts()]

    before = column()
    head.locator("button").click()
    assert column() == sorted(before) != before
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert column() == sorted(before, reverse=True)
    assert all(image.evaluate("i => i.complete && i.naturalWidth > 0") for image in view.locator("img").all())
    view.close()


def test_official_counts_are_whole_numbers_and_shares_are_not() -> None:
    official = {"accuracy": 1.0, "accuracy/few": 0.0, "n": 1.0, "videos/short": 0.0, "unscored": 12.0, "binned/1k": 0.5}
    run: Any = SimpleNamespace(label="x", arms=lambda task: {"blind": {"official": official}})
    made = official_table([run], "video-mme")
    assert made is not None
    assert [(name.text, value.text) for name, value in made.rows] == [
        ("accuracy", "1.000"), ("accuracy/few", "0.000"), ("n", "1"), ("videos/short", "0"), ("unscored", "12"),
        ("binned/1k", "0.500"),
    ]  # fmt: skip
