"""The house: imports run only downwards, torch-free rooms stay so, and every file can be read."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ("codes", "inputs", "model", "prepare", "train", "evaluate")  # in a reader's order
STAGES = ("prepare", "train", "evaluate", "compare")
ROOMS = sorted(f"machinery.{path.stem}" for path in (ROOT / "machinery").glob("[!_]*.py"))
TORCH_FREE = ("codes", "prepare", "compare", "machinery.files", "machinery.sources",
              "machinery.labels", "machinery.choices", "machinery.effects", "machinery.looks",
              "machinery.pareto", "machinery.records",
              "machinery.tokenizer", "machinery.workers", "machinery.shards", "machinery.runs",
              "machinery.sweep", "machinery.statistics", "machinery.figures", "machinery.twin",
              "machinery.downloads", "machinery.checks", "machinery.progress", "machinery.joining",
              "machinery.errors", "machinery.signals", "machinery.tables", "machinery.results",
              "machinery.arguments")
CORE_LINES, LONGEST_FILE, LONGEST_ROOM, LONGEST_FUNCTION, LONGEST_MAIN = 2350, 500, 330, 60, 80


def path_of(module):
    return ROOT / (module.replace(".", "/") + ".py")


def imports(module):
    """Return the project's modules that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & {"codes", "kernels", "inputs", "model", *STAGES, *ROOMS}


def level(module):
    """Return the floor a module is on; it may import from lower floors, and rooms from rooms."""
    floors = {"codes": 0, "kernels": 0, "inputs": 1, "model": 2}
    return floors.get(module, 3 if module in ROOMS else 4)


def all_modules():
    return ["codes", "kernels", "inputs", "model", *ROOMS, *STAGES]


@pytest.mark.parametrize("module", all_modules())
def test_imports_run_only_downwards(module):
    for other in imports(module):
        between_rooms = module in ROOMS and other in ROOMS
        assert level(other) < level(module) or between_rooms, f"{module} imports {other}"


def test_no_circle_among_rooms():
    left = {room: imports(room) & set(ROOMS) for room in ROOMS}
    while left:
        free = [room for room, needs in left.items() if not needs & set(left)]
        assert free, f"a circle among {', '.join(sorted(left))}"
        for room in free:
            del left[room]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_no_torch(module):
    """The import itself, in a process of its own: what a library brings along counts too."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"{module} imports torch"


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_the_core_is_read_in_an_evening():
    lines = {name: len(path_of(name).read_text(encoding="utf-8").splitlines()) for name in CORE}
    assert sum(lines.values()) <= CORE_LINES and max(lines.values()) <= LONGEST_FILE, lines
    rooms = {room: len(path_of(room).read_text(encoding="utf-8").splitlines()) for room in ROOMS}
    assert max(rooms.values()) <= LONGEST_ROOM, rooms


@pytest.mark.parametrize("module", all_modules())
def test_functions_are_short(module):
    for function in functions(path_of(module)):
        length = function.end_lineno - function.lineno + 1
        most = LONGEST_MAIN if (module, function.name) == ("train", "main") else LONGEST_FUNCTION
        assert length <= most, f"{module}.{function.name}: {length} lines"


def test_no_line_over_100_columns():
    paths = [*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py"), *ROOT.glob("tests/**/*.py")]
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 100, f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"


def dense(tree):
    """Yield (line, what): nested comprehensions, and assignments inside larger expressions."""
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    whole = [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.While))]
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            inside = [child for child in ast.walk(node) if child is not node]
            if len(node.generators) > 1 or any(isinstance(child, kinds) for child in inside):
                yield node.lineno, "a nested comprehension"
        if isinstance(node, ast.NamedExpr) and node not in whole:
            yield node.lineno, "a walrus inside an expression"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            yield node.lineno, "a lambda with a name"


@pytest.mark.parametrize("module", all_modules())
def test_one_idea_a_line(module):
    found = list(dense(ast.parse(path_of(module).read_text(encoding="utf-8"))))
    assert not found, f"{module}: {found}"


def test_text_has_an_encoding():
    """Else it is the locale's: a file with an accent could not be read on another machine."""
    for module in all_modules():
        nodes = ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8")))
        for call in [node for node in nodes if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func)
            is_binary = name == "open" and "b" in "".join(map(ast.unparse, call.args[1:2]))
            if (name == "open" or name.endswith((".read_text", ".write_text"))) and not is_binary:
                assert "encoding" in [word.arg for word in call.keywords], f"{module}: {name}"


def test_an_old_python_is_told_in_one_line():
    code = "import sys; sys.version_info = (3, 10, 14); import machinery"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("nanobit needs Python 3.11 or newer")
    assert done.stderr.count("\n") == 1


def test_the_readme_counts_lines_rightly():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    total = 0
    for number, name in enumerate(CORE, 1):
        lines = len(path_of(name).read_text(encoding="utf-8").splitlines())
        assert f"| {number} `{name}.py` | {lines} |" in text, f"{name}.py has {lines} lines"
        total += lines
    assert f"{total:,} lines" in text, f"{total:,} lines in all"
