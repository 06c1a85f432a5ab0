"""A random sample of mutants of a package: small faults, each in one place."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

Place = tuple[int, int]  # line from 1, column from 0

# cosmic-ray has more operators: their mutants break at once (removed decorators) or change nothing (`is` for `==`).
SIMPLE = (
    *("AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop", "ExceptionReplacer"),
    *("NumberReplacer", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub"),
)
COMPARISONS = (
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt"),
    *("Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
)
ARITHMETIC = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd", "LShift_RShift", "RShift_LShift"),
)
EXPRESSIONS = {"arith_expr", "term", "expr", "and_expr", "xor_expr", "shift_expr", "power"}
LARGEST_NUMBER = 10  # NumberReplacer adds or subtracts 1, which does not matter to a larger number


class RemoveCall:
    """Operator that replaces a statement that is only a call with `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Place, Place]]:
        """Yield the place of the call."""
        call = node.children[0] if node.type == "simple_stmt" else None
        if call is not None and call.type == "atom_expr" and call.get_last_leaf() == ")":
            yield call.start_pos, call.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return the statement without the call."""
        node.children[0] = parso.parse(node.get_first_leaf().prefix + "pass")
        return node


NAMES = [
    *SIMPLE,
    *(f"ReplaceComparisonOperator_{name}" for name in COMPARISONS),
    *(f"ReplaceBinaryOperator_{name}" for name in ARITHMETIC),
]
OPERATORS: dict[str, Any] = {name: get_operator(f"core/{name}")() for name in NAMES} | {"RemoveCall": RemoveCall()}


@dataclass(frozen=True)
class Mutant:
    """One fault in one file.

    Attributes:
        path: The file, relative to the root of the tree.
        line: The line of the fault, from 1.
        statement: The lines of the statement with the fault; of a compound statement only the head.
        operator: The name of the operator that made the fault.
        code: The file with the fault.
        diff: The difference from the file without it.
    """

    path: str
    line: int
    statement: range
    operator: str
    code: str
    diff: str


def sample_mutants(root: Path, paths: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Draw places at random, and for each place one of the operators that fit.

    Args:
        root: The root of the tree.
        paths: Packages or modules, relative to the root.
        count: The number of mutants to draw; a small package has fewer.
        seed: The seed of the draw.
    """
    files = [file for path in paths for file in sorted((root / path).rglob("*.py")) or [root / path]]
    places = [(file, place, fits) for file in files for place, fits in _find_places(file.read_text()).items()]
    draw = random.Random(seed)  # noqa: S311  # nothing secret
    draw.shuffle(places)
    mutants = (_mutate(root, file, place[0], *draw.choice(fits)) for file, place, fits in places)
    drawn = [mutant for mutant, _ in zip(filter(None, mutants), range(count), strict=False)]
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line))


def _find_places(code: str) -> dict[Place, list[tuple[str, int]]]:
    """Return the operators that fit each place, with the index of the occurrence that cosmic-ray asks for."""
    skipped = [span for node in ast.walk(ast.parse(code)) for span in _spans_without_effect(node)]
    nodes = list(ast_nodes(get_ast(code)))
    places: dict[Place, list[tuple[str, int]]] = {}
    for name, operator in OPERATORS.items():
        positions = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(positions):
            if _can_matter(name, node) and not any(first <= start < last for first, last in skipped):
                places.setdefault(start, []).append((name, occurrence))
    return places


def _can_matter(name: str, node: Any) -> bool:
    if name == "NumberReplacer":
        return abs(ast.literal_eval(node.value)) <= LARGEST_NUMBER
    if name == "ExceptionReplacer":
        return "." not in node.get_code()  # cosmic-ray fails on `except redis.ConnectionError`
    return "Binary" not in name or node.parent.type in EXPRESSIONS  # the `*` of a signature is no operator


def _spans_without_effect(node: ast.AST) -> Iterator[tuple[Place, Place]]:
    """Yield the spans of annotations, log and error messages, declarations and abstract methods."""
    skipped: Any = None
    match node:
        case ast.arg() | ast.AnnAssign():
            skipped = node.annotation
        case ast.FunctionDef(decorator_list=[*_, ast.Name(id="abstractmethod" | "overload")]):
            skipped = node
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            skipped = node.returns
        case (
            ast.Raise() | ast.ClassDef(bases=[*_, ast.Name(id="Protocol")]) | ast.If(test=ast.Name(id="TYPE_CHECKING"))
        ):
            skipped = node
        case ast.Call(func=ast.Name(id="zip"), keywords=[ast.keyword() as keyword]):
            skipped = keyword  # strict=True is an assertion
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger"))):
            skipped = node
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]) | ast.keyword(arg="frozen" | "kw_only"):
            skipped = node
        case _:
            pass
    if skipped is not None:
        yield (skipped.lineno, skipped.col_offset), (skipped.end_lineno, skipped.end_col_offset)


def _mutate(root: Path, file: Path, line: int, operator: str, occurrence: int) -> Mutant | None:
    code, path = file.read_text(), str(file.relative_to(root))
    mutated = mutate_code(code, OPERATORS[operator], occurrence)
    try:
        if mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(code)):
            return None
    except SyntaxError:
        return None
    diff = "\n".join(difflib.unified_diff(code.splitlines(), mutated.splitlines(), path, path, lineterm="", n=2))
    statements = [_lines(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    statement = max((lines for lines in statements if lines.start <= line), key=lambda lines: lines.start)
    return Mutant(path, line, statement, operator, mutated, diff)


def _lines(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    return range(node.lineno, max(body[0].lineno, node.lineno + 1) if body else (node.end_lineno or node.lineno) + 1)
