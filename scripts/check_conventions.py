"""Style checks that ruff does not have: docstrings, words, names, folder sizes, imports."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hpctrain"

MAX_MODULES = 22
#: Code that `tests/simulation` runs in virtual time.
SIMULATED = ("supervisor", "records", "slurm")

FIRST_WORD = re.compile(r"(What|Whether|Which|Who|Whom|Whose|Whoever|Where|How|Of|Nobody|Somebody)\b")
BANNED = re.compile(
    r"\b(nobody|somebody|whoever|anew|alike|go(es)? on|went on|(is|are) (said|told)|hears? of|tells? of)\b",
    re.IGNORECASE,
)


def main() -> int:
    """Print every violation as FILE:LINE: MESSAGE. Returns 1 if there are violations."""
    modules = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    problems = [
        *_class_names(modules),
        *_folder_sizes(),
        *_imports_of_own_package(),
        *(problem for path, tree in modules.items() for problem in _docstrings(path, tree)),
        *(problem for path in modules for problem in _words(path)),
        *_direct_uses_of_system(modules),
    ]
    for path, line, message in problems:
        print(f"{path.relative_to(ROOT)}:{line}: {message}")
    return 1 if problems else 0


def _class_names(modules: dict[Path, ast.Module]) -> Iterator[tuple[Path, int, str]]:
    defined: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                defined[node.name].append((path, node.lineno))
    for name, (first, *others) in defined.items():
        for path, line in others:
            if not name.startswith("_"):
                yield path, line, f"class {name} is also defined in {first[0].relative_to(ROOT)}"


def _folder_sizes() -> Iterator[tuple[Path, int, str]]:
    for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())):
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if count > MAX_MODULES:
            yield folder, 1, f"{count} modules in one folder; at most {MAX_MODULES}: group them in packages"


def _imports_of_own_package() -> Iterator[tuple[Path, int, str]]:
    """Find imports of a package by its own modules; import-linter compares only siblings."""
    graph = grimp.build_graph(PACKAGE.name, exclude_type_checking_imports=False, cache_dir=None)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if module.startswith(f"{imported}."):
                (detail, *_) = graph.get_import_details(importer=module, imported=imported)
                path = ROOT / module.replace(".", "/")
                path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                yield path, detail["line_number"], f"{module} imports its own package {imported}"


def _direct_uses_of_system(modules: dict[Path, ast.Module]) -> Iterator[tuple[Path, int, str]]:
    """Find simulated code that takes time, threads or processes from the standard library."""
    origins = {
        (node.module, alias.name): alias.asname or alias.name
        for node in ast.walk(modules[PACKAGE / "system.py"])
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "typing", "importlib")
        for alias in node.names
    }
    for path, tree in modules.items():
        simulated = path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in SIMULATED
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "hpctrain.system":
                yield path, node.lineno, "import the module: from hpctrain import system"
            if not simulated:
                continue
            used = []
            if isinstance(node, ast.ImportFrom):
                used = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = [(node.value.id, node.attr)]
            for module, name in used:
                if own := origins.get((module, name)):
                    yield path, node.lineno, f"use system.{own} instead of {module}.{name}"


def _docstrings(path: Path, tree: ast.Module) -> Iterator[tuple[Path, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if match := FIRST_WORD.match(text):
                line = node.body[0].lineno
                yield path, line, f"docstring starts with {match[1]!r}; use a noun phrase or an imperative"


def _words(path: Path) -> Iterator[tuple[Path, int, str]]:
    """Find words to avoid in comments and docstrings. Messages are not checked."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        is_prose = token.type == tokenize.COMMENT or token.string.startswith('"""')
        if is_prose and (match := BANNED.search(token.string)):
            yield path, token.start[0], f"{match[0]!r} is a word to avoid; see BANNED in this script"


if __name__ == "__main__":
    sys.exit(main())
