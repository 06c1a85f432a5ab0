"""How a drafter's acceptance, speed and payback follow from its size and its traffic."""
