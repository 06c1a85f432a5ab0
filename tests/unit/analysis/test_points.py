from __future__ import annotations

import pytest

from osd.analysis.scaling.points import ScalingError, read, write
from tests.unit.analysis.made_up import points


def test_points_round_trip_through_a_file(tmp_path):
    file, made = tmp_path / "points.jsonl", points(noise=0.01)
    assert read(file) == []
    write(file, made[:3])
    write(file, made)
    assert read(file) == made


def test_incomplete_last_line_is_ignored(tmp_path):
    file, made = tmp_path / "points.jsonl", points()
    write(file, made)
    file.write_bytes(file.read_bytes()[:-5])
    assert read(file) == made[:-1]


@pytest.mark.parametrize("line", [b"no json\n", b"{}\n", b'{"layers": 1}\n', b"\xff\n"])
def test_invalid_point_is_refused_with_its_line(tmp_path, line):
    file = tmp_path / "points.jsonl"
    write(file, points()[:1])
    file.write_bytes(file.read_bytes() + line)
    with pytest.raises(ScalingError, match=r"points.jsonl, line 2 is not a point of osd bench scaling"):
        read(file)


def test_figures_follow_from_the_counts():
    point = points()[0]
    assert point.agreement == point.accepted / 1_000_000
    assert point.length == pytest.approx(1 + 2 * point.agreement)
    assert point.round_cost == pytest.approx(4 * 0.06 + 1.2 + 0.1)
    assert point.speedup == pytest.approx(point.length / point.round_cost)
