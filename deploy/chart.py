"""A chart of a share over time, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def chart(
    points: Sequence[tuple[float, float]], marks: Sequence[float], seconds: float, width: int, height: int
) -> str:
    """Columns for values between 0 and 1, and under them a ``^`` for each mark.

    Args:
        points: (time, value); the last one of a column counts, and a column without any repeats the one before.
        marks: times.
        seconds: what the whole width stands for.
        width: columns of values.
        height: lines of values.
    """
    column = width / max(seconds, 1e-9)
    levels = [0] * width
    filled = 0
    for time, value in points:
        place = min(int(time * column), width - 1)
        level = round(max(0.0, min(1.0, value)) * 8 * height)
        for between in range(filled, place):
            levels[between] = levels[filled - 1] if filled else 0
        levels[place], filled = level, place + 1
    lines = []
    for line in reversed(range(height)):
        label = f"{(line + 1) / height:4.2f} " if line % 2 == (height - 1) % 2 else "     "
        lines.append(label + "".join(_EIGHTHS[max(0, min(8, level - 8 * line))] for level in levels).rstrip())
    under = [" "] * width
    for mark in marks:
        under[min(int(mark * column), width - 1)] = "^"
    lines.append("     " + "".join(under).rstrip())
    lines.append(f"     0 s{f'{seconds:.0f} s':>{width - 3}}")
    return "\n".join(lines)
