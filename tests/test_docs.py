"""The documents are true: their code runs, their commands compose, their links and tests exist, their tables agree."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from ckptplan import cli, sweeps
from ckptplan.config import RunConfig
from ckptplan.hydra_folders import config_folder, prepare_hydra
from ckptplan.record import METRIC_KEYS, STATUS_EXIT_CODES, RunResult, flatten

REPOSITORY = Path(cli.__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
# design.md, cases.md and state-design.md say what is wanted, in pseudo-code too; their links count all the same.
WANTED_ONLY = ("design.md", "cases.md", "state-design.md")
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]
GUIDES = [page for page in PAGES if page.name not in WANTED_ONLY]
PROGRAMS = {"train.py": cli.main, "sweep.py": lambda arguments: cli.main(cli.sweep_arguments(arguments))}


class Block(NamedTuple):
    """A fenced piece of a page; ``file`` is the name in a first line such as ``# my_net.py``."""

    page: str
    number: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        named = re.search(r"\A(?:# @package.*\n)?# ([\w./-]+\.(?:py|yaml))$", self.text, re.MULTILINE)
        return named[1] if named else None


def blocks_of(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(page.name, number, language, text) for number, (language, text) in enumerate(found)]


BLOCKS = [block for page in GUIDES for block in blocks_of(page)]


class Command(NamedTuple):
    page: str
    program: str
    arguments: tuple[str, ...]
    exit_code: int


def commands_of(text: str, page: str) -> Iterator[Command]:
    """Every ``python train.py ...`` in lines of a shell; a comment "exit code 2" says how it has to end."""
    for line in text.splitlines():
        promised = re.search(r"# exit code (\d+)", line)
        for part in re.split(r" && ", line):
            words = shlex.split(part, comments=True) if re.match(r"python (train|sweep)\.py", part.strip()) else []
            if words:
                yield Command(page, words[1], tuple(words[2:]), int(promised[1]) if promised else 0)


def all_commands() -> list[Command]:
    found = [command for b in BLOCKS if b.language in ("bash", "") for command in commands_of(b.text, b.page)]
    for page in GUIDES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`(python (?:train|sweep)\.py[^`]*)`", prose):
            if "<" not in code:  # a placeholder, or a key that is pressed
                found += commands_of(code, page.name)
    return list({(command.program, command.arguments): command for command in reversed(found)}.values())[::-1]


COMMANDS = all_commands()


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reader starts: the files that the pages tell them to make lie there and can be imported."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for block in BLOCKS:
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")


@pytest.fixture
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_logging: None) -> Path:
    """The folder a reader stands in: with the files that the pages tell them to make, runs and jobs replaced."""
    stand_in(tmp_path, monkeypatch)
    stub = types.ModuleType("ckptplan.run")
    stub.run_job = lambda *_, **__: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ckptplan.run", stub)
    ranks = types.ModuleType("ckptplan.engine.launch")
    ranks.run_on_ranks = lambda *_: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ckptplan.engine.launch", ranks)
    monkeypatch.setattr(sweeps, "run_jobs", lambda jobs, *_, **__: len(jobs))
    for number, name in enumerate((None, "first", "a=b, {c}")):  # earlier runs of the reader's, for resume=
        folder = tmp_path / "outputs" / f"run{number}"
        (folder / "state" / "step-60").mkdir(parents=True)
        (folder / "state" / "step-60" / "manifest.json").touch()
        (folder / "config.yaml").write_text(yaml.safe_dump({"name": name}), encoding="utf-8")
    (tmp_path / "outputs" / "latest").symlink_to("run0")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page}: {c.program} {' '.join(c.arguments)}")
def test_every_command_in_the_guides_composes_or_ends_as_the_page_says(
    start_folder: Path, command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = PROGRAMS[command.program](list(command.arguments))
    except SystemExit as end:  # --help and the like
        code = int(end.code or 0)
    assert code == command.exit_code, capfd.readouterr().err


def test_there_are_commands_and_some_of_them_are_wrong_on_purpose() -> None:
    assert len(COMMANDS) > 40
    assert {command.exit_code for command in COMMANDS} == {0, 2}
    assert {command.page for command in COMMANDS} >= {"README.md", "configuration.md"}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: f"{b.page} {b.number}")
def test_every_piece_of_python_in_the_guides_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    sweep = tmp_path / "outputs" / "multirun" / "2026-12-01" / "16-18-03"  # an earlier one of the reader's
    sweep.mkdir(parents=True)
    (sweep / "results.jsonl").write_text(json.dumps({"job": "000_dp", **RunResult().to_dict()}), encoding="utf-8")
    exec(compile(block.text, f"{block.page}, block {block.number}", "exec"), {"__name__": "__main__"})


def test_values_in_the_documented_form_arrive_as_the_same_text() -> None:
    """The quoted names of the page, as text: what the page promises of the form itself."""
    section = (DOCS / "configuration.md").read_text(encoding="utf-8").partition("## Values with awkward")[2]
    names = [
        shlex.split(line, comments=True)[2] for line in section.splitlines() if line.startswith("python train.py 'name")
    ]
    wanted = [
        "a=b, {c} (d) [e] #1 @home 100%",
        "~/runs",
        "007",
        "null",
        "größe",
        'say "hi"',
        "it's",
        "${not a reference}",
    ]
    assert [loaded_name(argument) for argument in names] == wanted


def loaded_name(argument: str) -> str | None:
    from hydra import compose, initialize_config_dir

    from ckptplan.config.loading import load_config

    prepare_hydra(reserve_folders=False)
    with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        return load_config(compose("train", overrides=[argument])).name


# --- links and names --------------------------------------------------------------------------------------------------


def headings(page: Path) -> set[str]:
    """The anchors of a page, made as the public code host makes them."""
    lines = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


MADE_BY_THE_USER = ("conf/local/default.yaml",)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_file_that_is_not_here(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "knowledge/" not in text
    for name in re.findall(r"`((?:docs|tests|conf|ckptplan)/[\w./-]+\.\w+)`", text):
        assert (REPOSITORY / name).exists() or name in MADE_BY_THE_USER, name


def names_of_tests(path: Path) -> set[str]:
    """``name`` and ``Class::name`` of every test of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def named_tests(page: Path) -> list[str]:
    return re.findall(r"`((?:\w+/)*test_\w+\.py(?:::\w+)+)`", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for named in dict.fromkeys(named_tests(page)):
        file, _, name = named.partition("::")
        path = REPOSITORY / "tests" / file
        if not path.exists() or name not in names_of_tests(path):
            missing.append(named)
    assert missing == []


RESUMING = [46, 47, 48, 49, 58, *range(61, 69), *range(71, 75), 77]
RECOMPUTATION = [1, 2, 4, 5, 6, 9, 10, 11, 14, 15, 16, *range(18, 27)]
REPORTS = [*RECOMPUTATION, 29, 31, 32, 33, 34, 37, 40, 41, 43, 44, 45, *RESUMING, *range(105, 117), 118]
CASES = [
    "C01",
    "C03",
    "C04",
    "C05",
    "C08",
    "C11",
    "C12",
    "C14",
    "C16",
    "C19",
    "C21",
    "C23",
    "C25",
    *(f"P{n}" for n in range(1, 15)),
]


def test_every_report_and_every_case_has_a_row_with_a_test_or_a_reason() -> None:
    rows = [
        line.split("|")[1:-1]
        for line in (DOCS / "reports.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    told = {row[0].strip(): row[-1].strip() for row in rows}
    for number in [*(f"B{n:02}" for n in REPORTS), *CASES]:
        assert number in told, number
        assert "test_" in told[number] or told[number].startswith("No test:"), number


# --- tables -----------------------------------------------------------------------------------------------------------

CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_exit_codes_are_those_of_the_code() -> None:
    told = dict(re.findall(r"^\| (?:`(\w+)`|\(none, or failed\)) \| (\d+) \|", CONFIGURATION, re.MULTILINE))
    assert told.pop("") == "2"
    assert {status: int(code) for status, code in told.items()} == STATUS_EXIT_CODES
    assert "SIGTERM the exit code is 143" in CONFIGURATION


def keys_of(schema: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(schema):
        inner = field.default_factory
        if dataclasses.is_dataclass(inner):
            yield from keys_of(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_every_key_of_the_schema_is_told() -> None:
    missing = [key for key in keys_of(RunConfig) if f"`{key}`" not in CONFIGURATION and key not in ("data", "model")]
    assert missing == []


@pytest.mark.parametrize("group", ["data", "model", "optimizer"])
def test_every_key_of_the_shipped_files_is_told(group: str) -> None:
    for path in sorted((REPOSITORY / "conf" / group).glob("*.yaml")):
        assert f"`{path.stem}`" in CONFIGURATION or f"`{group}={path.stem}`" in CONFIGURATION
        shipped = OmegaConf.load(path)
        shipped = shipped.get(group, shipped)  # a file may set keys of other groups too
        keys = [str(key) for key in shipped if not str(key).startswith("_") and key != "defaults"]
        assert [key for key in keys if f"`{key}`" not in CONFIGURATION] == []


def test_every_metric_and_every_experiment_is_told() -> None:
    names = [*METRIC_KEYS, *(path.stem for path in (REPOSITORY / "conf" / "experiment").glob("*.yaml"))]
    assert [name for name in names if f"`{name}`" not in CONFIGURATION] == []


def test_every_key_of_the_result_is_explained() -> None:
    section = CONFIGURATION.partition("The keys of `result.json`")[2].partition("## ")[0]
    told = set(re.findall(r"`(?:\w+/)?(\w+)`", section))
    keys = {name.rpartition("/")[2] for name in flatten(RunResult().to_dict())} - {"schema"}
    assert keys - told == set()


def test_no_page_says_where_it_was_written() -> None:
    for page in PAGES:
        assert not re.search(r"/(work|root|home|tmp)/", page.read_text(encoding="utf-8")), page.name


def test_the_design_lists_every_file_of_the_package() -> None:
    listed = (DOCS / "design.md").read_text(encoding="utf-8")
    files = [path.name for path in (REPOSITORY / "ckptplan").glob("*.py")]
    assert [name for name in files if name not in listed] == []


def rows_with_defaults() -> Iterator[tuple[str, str]]:
    """(key, default as told) of every table of the page that has a column "default"."""
    column = 0
    for line in CONFIGURATION.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if "default" in cells:
            column = cells.index("default")
        elif not line.startswith("|"):
            column = 0
        elif column and (key := re.fullmatch(r"\|? ?`([\w.]+)`", cells[0])):
            yield key[1], cells[column]


def test_the_defaults_that_the_tables_tell_are_those_of_a_plain_run(compose: Callable[..., DictConfig]) -> None:
    config = compose()
    told = {key: re.match(r"`([^`]*)`", default) for key, default in rows_with_defaults()}
    wrong = []
    for key, default in told.items():
        assert default, key
        value = OmegaConf.select(config, key)
        is_group = key == "optimizer"
        found = config.hydra.runtime.choices.optimizer if is_group else getattr(value, "value", value)
        if found != OmegaConf.create([yaml.safe_load(default[1])])[0]:
            wrong.append(f"{key}: told {default[1]}, is {found}")
    assert wrong == []
    assert len(told) > 30


@pytest.mark.parametrize("group", ["data", "model", "optimizer"])
def test_the_values_that_the_page_tells_are_those_of_the_shipped_files(group: str) -> None:
    compared = 0
    for path in sorted((REPOSITORY / "conf" / group).glob("*.yaml")):
        shipped = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(shipped, dict)
        shipped = shipped.get(group, shipped)  # a file may set keys of other groups too
        row = next((line for line in CONFIGURATION.splitlines() if line.startswith(f"| `{path.stem}` |")), "")
        for key, text in re.findall(r"`(\w+)` (\[[^\]]*\]|[\w.-]*\w)", row):
            if key in shipped and text not in ("from", "and"):
                assert yaml.safe_load(text) == shipped[key], f"{path.stem}: {key}"
                compared += 1
    assert compared >= {"data": 20, "model": 14, "optimizer": 0}[group]
