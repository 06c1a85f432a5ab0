"""Docstrings of public classes and functions: they exist, begin in the right form, and name attributes that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("osd", "serving", "trainer", "deploy", "benchmarks", "examples", "docs")
NO_VERBS = {"Content", "Largest", "Logarithm", "Mean", "Number", "Seconds", "See", "Size", "Smallest", "The", "Whether"}
NO_NOUNS = {"Get", "How", "Return", "See", "There", "True"}


class Product:
    """Definitions in the sources of modules, by full name."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.imports: dict[str, str] = {}
        self.bases: dict[str, list[str]] = {}
        self.attributes: dict[str, set[str]] = {}
        self.docstrings: dict[str, str | None] = {}
        self.public: set[str] = set()
        self.nouns: set[str] = set()
        for module, source in sources.items():
            self.add(module, ast.parse(source).body, is_public=True)
        self.bases = {name: [self.resolve(base) for base in bases] for name, bases in self.bases.items()}

    def add(self, owner: str, body: Iterable[ast.stmt], is_public: bool) -> None:
        for node in body:
            if isinstance(node, ast.ImportFrom):
                imports = {f"{owner}.{part.asname or part.name}": f"{node.module}.{part.name}" for part in node.names}
                self.imports |= imports
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name, is_shown = f"{owner}.{node.name}", is_public and not node.name.startswith("_")
                self.docstrings[name] = self.docstrings.get(name) or ast.get_docstring(node)
                self.public |= {name} if is_shown else set()
                if isinstance(node, ast.ClassDef):
                    self.bases[name] = [f"{owner}.{ast.unparse(base).partition('[')[0]}" for base in node.bases]
                    parts = list(ast.walk(node))
                    self.attributes[name] = {part.id for part in parts if isinstance(part, ast.Name)}
                    self.attributes[name] |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
                    self.add(name, node.body, is_shown)
                if isinstance(node, ast.ClassDef) or any("property" in ast.unparse(d) for d in node.decorator_list):
                    self.nouns.add(name)

    def resolve(self, name: str) -> str:
        """Return the name under which the definition of ``name`` stands, which modules may import from each other."""
        full, *parts = name.split(".")
        for part in parts:
            full = f"{full}.{part}"
            while full in self.imports:
                full = self.imports[full]
        return full

    def lineage(self, name: str) -> Iterator[str]:
        """Yield a class and the classes of the product that it derives from."""
        if name in self.bases:
            yield name
            for base in self.bases[name]:
                yield from self.lineage(base)

    def docstring(self, name: str) -> str | None:
        owner, _, method = name.rpartition(".")
        inherited = (self.docstrings.get(f"{base}.{method}") for base in self.lineage(owner))
        return next(filter(None, (self.docstrings[name], *inherited)), None)

    def undocumented(self) -> list[str]:
        return sorted(name for name in self.public if self.docstring(name) is None)


@cache
def product() -> Product:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    modules = (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return Product({module: file.read_text() for module, file in zip(modules, files, strict=True)})


def test_every_public_definition_has_or_inherits_a_docstring():
    assert product().undocumented() == []


def test_only_a_base_class_passes_its_docstring_on():
    base = 'class Base:\n    """Base."""\n    def run(self):\n        """Run."""\n'
    child = 'class Child(Base):\n    """Child."""\n    def run(self): ...\n'
    room = {"room": "from room.base import Base\n", "room.base": base}
    assert Product(room | {"other": f"from room import Base\n{child}"}).undocumented() == []
    assert Product(room | {"other": f"class Base: ...\n{child}"}).undocumented() == ["other.Base", "other.Child.run"]
    assert Product({"room": "def run(): ...\ndef _run(): ...\n"}).undocumented() == ["room.run"]


def test_docstrings_begin_with_a_verb_or_a_noun():
    for name in product().public:
        word = (product().docstring(name) or "").partition(" ")[0].strip(".,;:")
        assert word not in NO_NOUNS if name in product().nouns else word not in NO_VERBS and word.istitle(), name


def test_attributes_in_docstrings_exist():
    for name in product().bases:
        section = (product().docstrings[name] or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        names = set().union(*(product().attributes[base] for base in product().lineage(name)))
        assert set(re.findall(r"^    (\w+):", section, re.MULTILINE)) <= names, name
