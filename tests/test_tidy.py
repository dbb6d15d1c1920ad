"""The house rules that no linter knows, checked on the text of the repository.

They keep the code small, documented and honest: what a rule forbids has cost somebody an evening before. A rule that is wrong is
changed here, in the open, not worked around.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("training", "tasks", "flows", "infra", "examples", "benchmarks", "tests")
SHIPPED = ("training", "tasks", "flows", "infra")
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_POSITIONAL = 5

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Every Python file of the repository, by its path from the root."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


@cache
def texts() -> dict[str, str]:
    """Every text file under version control or about to be, by its path from the root."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, capture_output=True, check=True).stdout.decode().split("\0")
    found = {}
    for name in filter(None, names):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in data:
            found[name] = data.decode("utf-8")
    return found


def shipped() -> dict[str, ast.Module]:
    """The modules that run outside the tests."""
    return {name: tree for name, tree in modules().items() if name.startswith(SHIPPED)}


def in_tests() -> dict[str, ast.Module]:
    """The modules of the test suite."""
    return {name: tree for name, tree in modules().items() if name.startswith("tests/")}


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def report(problems: list[str]) -> None:
    """Fail with one line per problem."""
    assert not problems, "\n" + "\n".join(problems)


def documents() -> dict[str, str]:
    """The pages a reader is sent to."""
    return {name: text for name, text in texts().items() if name.endswith(".md")}


def test_modules_are_short() -> None:
    """A module fits in one head: at most 400 lines."""
    lengths = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in modules()}
    report([f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MAX_MODULE_LINES])


def test_functions_are_short() -> None:
    """A function fits on one screen: at most 50 lines without its docstring."""
    problems = []
    for name, tree in modules().items():
        for function in functions(tree):
            first = function.body[0]
            documented = ast.get_docstring(function) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            lines = (function.end_lineno or 0) - function.lineno + 1 - docstring
            if lines > MAX_FUNCTION_LINES:
                problems.append(f"{name}:{function.lineno}: {function.name} has {lines} lines")
    report(problems)


def test_few_positional_parameters() -> None:
    """A call can be read without counting: at most five positional parameters, the rest by name."""
    problems = []
    for name, tree in modules().items():
        for function in functions(tree):
            arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            count = len([argument for argument in arguments if argument not in ("self", "cls")])
            is_test = function.name.startswith("test_")  # pytest hands fixtures over by name
            if count > MAX_POSITIONAL and not is_test:
                problems.append(f"{name}:{function.lineno}: {function.name} takes {count} positional parameters")
    report(problems)


def test_every_module_says_what_it_is() -> None:
    """A module opens with a docstring."""
    report([name for name, tree in modules().items() if not ast.get_docstring(tree)])


def test_every_public_name_is_documented() -> None:
    """Public functions and classes say what they promise; a method may inherit its promise from the seam it implements."""
    promised = {
        method.name
        for tree in shipped().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in functions(node)
        if ast.get_docstring(method)
    }
    problems = []
    for name, tree in shipped().items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                problems.append(f"{name}:{node.lineno}: {node.name} has no docstring")
            methods = (
                [item for item in node.body if isinstance(item, Function)] if isinstance(node, ast.ClassDef) else []
            )
            for method in methods:
                if not (method.name.startswith("_") or ast.get_docstring(method) or method.name in promised):
                    problems.append(f"{name}:{method.lineno}: {node.name}.{method.name} has no docstring")
    report(problems)


def test_every_public_function_is_annotated() -> None:
    """Types are complete: every parameter and every result of a shipped function has one."""
    problems = []
    for name, tree in shipped().items():
        for function in functions(tree):
            parameters = function.args
            arguments = (
                *parameters.posonlyargs,
                *parameters.args,
                *parameters.kwonlyargs,
                parameters.vararg,
                parameters.kwarg,
            )
            bare = [a.arg for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
            if bare or function.returns is None:
                problems.append(f"{name}:{function.lineno}: {function.name} lacks types for {bare or 'its result'}")
    report(problems)


def test_every_test_says_what_it_shows() -> None:
    """A test states in one sentence what holds."""
    report(
        [
            f"{name}:{function.lineno}: {function.name} has no docstring"
            for name, tree in in_tests().items()
            for function in functions(tree)
            if function.name.startswith("test_") and not ast.get_docstring(function)
        ]
    )


def test_names_say_something() -> None:
    """No module is a drawer for whatever is left."""
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
    report([name for name in modules() if drawers & {part.removesuffix(".py") for part in name.split("/")}])


def test_nothing_is_left_for_later() -> None:
    """Notes to oneself belong in the tracker: the words for them do not occur."""
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    report(
        [
            f"{name}: {found.group()}"
            for name, text in texts().items()
            if name != "LICENSE" and (found := words.search(text))
        ]
    )


def test_no_path_of_one_machine() -> None:
    """The repository works anywhere: no home folder, no checkout folder."""
    path = re.compile(r"(?<![\w.~$}])/(?:root|home|Users|work)/\w+")
    report([f"{name}: {found.group()}" for name, text in texts().items() if (found := path.search(text))])


def test_no_pickle() -> None:
    """Checkpoints and messages are typed data: nothing shipped can execute what it reads."""
    banned = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    report(
        [
            f"{name}: {item}"
            for name, tree in shipped().items()
            for item in imported(tree)
            if item.split(".")[0] in banned
        ]
    )


def test_no_mocks() -> None:
    """Tests use real processes, files and servers; our own code is never replaced by a stand-in."""
    problems = []
    for name, tree in in_tests().items():
        problems += [f"{name}: imports {item}" for item in imported(tree) if "mock" in item.split(".")]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr" and node.args:
                target = ast.unparse(node.args[0]).strip("'\"")
                if target.startswith(("torchrelay", "tasks", "flows", "infra")):
                    problems.append(f"{name}:{node.lineno}: replaces {target}")
    report(problems)


def test_tests_do_not_wait_blindly() -> None:
    """A test waits for a condition with a deadline: a sleep stands only inside the loop that asks again."""
    problems = []
    for name, tree in in_tests().items():
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.For)]
        polling = {id(node) for loop in loops for node in ast.walk(loop)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("time.sleep", "sleep")
                and id(node) not in polling
            ):
                problems.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    report(problems)


def test_flow_files_shadow_nothing() -> None:
    """Prefect puts the folder of a flow first on sys.path: no file in it bears the name of an importable module."""
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    stems = {Path(name).stem for name in modules() if name.startswith("flows/")} - {"__init__"}
    report([f"flows/{stem}.py hides the module {stem}" for stem in sorted(stems & taken)])


def test_documented_make_targets_exist() -> None:
    """`make x` on a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", texts()["Makefile"], re.MULTILINE))
    for name, text in documents().items():
        named = {word for line in re.findall(r"(?:^|`)make ([a-z ]+)", text, re.MULTILINE) for word in line.split()}
        assert named <= targets, f"{name}: make {', '.join(sorted(named - targets))}"


def test_documented_modules_exist() -> None:
    """`python -m x` on a page, in a compose file or in the Makefile is a module that can be run."""
    problems = []
    for name, text in texts().items():
        if not name.endswith((".md", ".yml", ".yaml", "Makefile", "Dockerfile")):
            continue
        for module in re.findall(r"(?:python3?\"?,? \"?-m\"?,? \"?)((?:torchrelay|infra|tasks|flows)[\w.]*)", text):
            if importlib.util.find_spec(module) is None:
                problems.append(f"{name}: python -m {module}")
    report(problems)


def test_documented_subcommands_exist() -> None:
    """`torchrelay x` on a page is a command of the CLI."""
    program = "import sys; from torchrelay.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    known = set(re.findall(r"^    ([a-z]+)(?: |$)", shown, re.MULTILINE))
    assert {"up", "train"} <= known, shown
    problems = []
    for name, text in documents().items():
        used = set(re.findall(r"(?:^|[`$] ?|bin/)torchrelay ([a-z]+)\b", text, re.MULTILINE))
        problems += [f"{name}: torchrelay {word}" for word in sorted(used - known)]
    report(problems)


def test_links_between_pages_hold() -> None:
    """A relative link leads to a file that exists."""
    problems = []
    for name, text in documents().items():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (ROOT / name).parent.joinpath(target).exists():
                problems.append(f"{name}: {target}")
    report(problems)
