from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from osd.verification.noise import Noise, Purpose

COUNT = 200_000


def ids(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count)


def constant(value: int, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), value)


def dependence(a: torch.Tensor, b: torch.Tensor, bins: int = 16) -> float:
    """Return the p-value of a G-test that two series of numbers are uniform and independent."""
    cells = (a * bins).long() * bins + (b * bins).long()
    observed = cells.bincount(minlength=bins * bins).double()
    statistic = float(2 * torch.xlogy(observed, observed / (len(a) / bins**2)).sum())
    print(f"G = {statistic:.1f} with {bins * bins - 1} degrees of freedom")
    return float(chi2.sf(statistic, bins * bins - 1))


def along(name: str) -> torch.Tensor:
    """Return numbers for changing values of a single part of the key."""
    parts = {part: constant(3) for part in ("seed", "request", "step")}
    if name in parts:
        parts[name] = ids(COUNT)
        return Noise(**parts).uniform(Purpose.DRAFT, 5)
    noise = Noise(constant(3, 1), constant(3, 1), constant(3, 1))
    return noise.uniform(Purpose.DRAFT, ids(COUNT)[None])[0]


@pytest.mark.parametrize("part", ["seed", "request", "step", "index"])
def test_successive_numbers_are_independent(part: str) -> None:
    numbers = along(part)
    assert dependence(numbers[:-1:2], numbers[1::2]) > 1e-4
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1


def test_numbers_of_different_keys_are_independent() -> None:
    base = Noise(ids(COUNT), constant(9), constant(0)).uniform(Purpose.DRAFT, 1)
    changed = [
        Noise(ids(COUNT), constant(9), constant(0)).uniform(Purpose.ACCEPT, 1),
        Noise(ids(COUNT), constant(9), constant(0)).uniform(Purpose.RESIDUAL, 1),
        Noise(ids(COUNT), constant(9), constant(0)).uniform(Purpose.DRAFT, 2),
        Noise(ids(COUNT), constant(9), constant(1)).uniform(Purpose.DRAFT, 1),
        Noise(ids(COUNT), constant(8), constant(0)).uniform(Purpose.DRAFT, 1),
        Noise(ids(COUNT, 1), constant(9), constant(0)).uniform(Purpose.DRAFT, 1),
    ]
    assert all(dependence(base, numbers) > 1e-4 for numbers in changed)


def test_reused_key_fails_the_independence_test() -> None:
    noise = Noise(ids(COUNT), constant(9), constant(0))
    assert dependence(noise.uniform(Purpose.DRAFT, 1), noise.uniform(Purpose.DRAFT, 1)) < 1e-12


def test_flipped_key_bit_flips_half_of_the_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    key = [torch.randint(-(2**62), 2**62, (500,), generator=generator) for _ in range(3)]
    before = (Noise(*key).uniform(Purpose.DRAFT, 0) * 2**52).long()
    for part in range(3):
        for bit in range(64):
            flipped = list(key)
            flipped[part] = key[part] ^ (1 << bit if bit < 63 else -(2**63))
            changed = (Noise(*flipped).uniform(Purpose.DRAFT, 0) * 2**52).long() ^ before
            flips = sum(((changed >> b) & 1).double().mean() for b in range(52)) / 52
            assert 0.47 < float(flips) < 0.53, (part, bit)


def test_numbers_do_not_depend_on_the_batch() -> None:
    noise = Noise(ids(8), ids(8) * 31, ids(8) * 7)
    alone = Noise(ids(1, 5), ids(1, 5) * 31, ids(1, 5) * 7)
    grid = noise.uniform(Purpose.ACCEPT, ids(4)[None])
    assert torch.equal(grid[5:6], alone.uniform(Purpose.ACCEPT, ids(4)[None]))
    assert torch.equal(
        noise.rows(torch.tensor([5, 2])).uniform(Purpose.DRAFT, 3), noise.uniform(Purpose.DRAFT, 3)[[5, 2]]
    )
    assert torch.equal(noise.uniform(Purpose.ACCEPT, 2), grid[:, 2])


def test_probability_zero_is_never_and_one_always_true() -> None:
    noise = Noise(ids(COUNT), constant(0), constant(0))
    assert not noise.accept(torch.zeros(COUNT), Purpose.ACCEPT, 0).any()
    assert noise.accept(torch.ones(COUNT), Purpose.ACCEPT, 0).all()


def test_numbers_never_change_between_releases() -> None:
    noise = Noise(torch.tensor([0, -1]), torch.tensor([42, 2**62]), torch.tensor([0, 7]))
    drawn = noise.uniform(Purpose.DRAFT, torch.tensor([[0, 1]]))
    assert drawn.flatten().tolist() == pytest.approx(GOLDEN, abs=1e-15)


GOLDEN = [0.10403379833318993, 0.6246894052783988, 0.557946244220776, 0.3859550639350525]
