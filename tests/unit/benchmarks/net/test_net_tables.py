from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from benchmarks.net.passes import FROZEN, PLAIN, RECALL, TRAINED, BurstCapacity, NetResults
from benchmarks.net.tables import FIGURES, load_plot, load_table, net_plots, net_tables
from osd.cli.report import write_plot
from tests.unit.benchmarks.net.made_up_passes import CLIENTS, passes_of_ways, service_pass


def test_tables_show_medians_and_ratios_within_a_turn():
    turns = [passes_of_ways(trained={"tokens": 400 * gain}) for gain in (1.0, 2.0, 1.5)]
    turns[2][FROZEN] = service_pass(tokens=800.0)
    served, ratios, *_ = net_tables(NetResults(BurstCapacity(8, 1.0, 10.0), 0.6, turns))
    rows = {row[0]: dict(zip(served.columns[1:], row[1:], strict=True)) for row in served.rows}
    assert list(rows) == list(FIGURES)
    speeds = rows["tokens per busy second"]
    assert (speeds[FROZEN], speeds[TRAINED]) == ("8.0 (8.0 to 16.0)", "12.0 (8.0 to 16.0)")
    compared = {row[0]: row[1] for row in ratios.rows}
    assert compared["trained / frozen"] == "1.000 (0.750 to 2.000)"
    assert compared["trained / plain"] == "1.500 (1.000 to 2.000)"
    assert compared["recall + trained / recall"] == "1.000 (1.000 to 1.000)"


def test_tables_show_cost_and_payback_of_training():
    results = NetResults(
        BurstCapacity(8, 1.0, 10.0), 0.6, [passes_of_ways(trained={"busy": 30.0}, recall_trained={"busy": 49.0})]
    )
    _, _, paid = net_tables(results)
    assert paid.rows == [
        ("1, trained / frozen", "20.0", "40.0", "100", "100"),
        ("1, recall + trained / recall", "20.0", "2.0", "not in this pass", "100"),
    ]


def test_missing_figure_is_shown_as_a_dash():
    alone = passes_of_ways(trained={"clients": {**CLIENTS, "gaps_p99": None}})
    served, ratios, *_ = net_tables(NetResults(BurstCapacity(8, 1, 1), 1, [alone]))
    (row,) = [row for row in served.rows if row[0] == "between two pieces, p99 ms"]
    assert row[1:] == ("50.0", "50.0", "-", "50.0", "50.0", "50.0")
    assert {row[0]: row[3] for row in ratios.rows}["trained / plain"] == "-"


def test_plotted_speed_without_plain_decoding_is_absolute():
    rows = passes_of_ways(trained={"busy": 25.0})
    del rows[PLAIN]
    _, speed, *_ = net_plots(NetResults(BurstCapacity(8, 1, 1), 1, [rows]))
    assert speed.title == "tokens per busy second"
    assert (speed.lines[FROZEN], speed.lines[TRAINED]) == ([(40, 8.0)], [(40, 16.0)])


def test_plotted_speed_is_relative_to_plain_decoding():
    rows = passes_of_ways()
    start, end = rows[PLAIN].curve[0], rows[PLAIN].curve[-1]
    half = replace(end, requests=20.0, tokens=100.0, busy=10.0)  # 10 tokens a second, then 7.5
    rows[PLAIN] = replace(rows[PLAIN], curve=[start, half, end])
    early = replace(end, requests=10.0, tokens=100.0, busy=5.0)  # 20 tokens a second, where plain has 10
    rows[TRAINED] = replace(rows[TRAINED], curve=[start, early, replace(end, requests=20.0, tokens=200.0, busy=25.0)])
    _, speed, *_ = net_plots(NetResults(BurstCapacity(8, 1, 1), 1, [rows]))
    assert speed.lines[PLAIN] == [(20, 1.0), (40, 1.0)]
    assert speed.lines[TRAINED] == [(10, 2.0), (20, 0.5)]
    assert speed.top == 2.0


def test_plots_show_medians_and_ranges_of_the_turns():
    turns = [passes_of_ways(trained={"busy": busy, "accepted": 2 * busy}) for busy in (25.0, 50.0, 40.0)]
    acceptance, speed, *_ = net_plots(NetResults(BurstCapacity(8, 1, 1), 1, turns))
    assert speed.lines[TRAINED] == [(40, 1.25)]
    assert speed.bands[TRAINED] == [(40, 1.0, 2.0)]
    assert acceptance.lines[TRAINED] == [(40, 0.4)]
    assert acceptance.bands[TRAINED] == [(40, 0.25, 0.5)]


def test_plots_show_acceptance_speed_cost_and_saving(tmp_path):
    rows = passes_of_ways(trained={"busy": 25.0, "accepted": 150.0})
    acceptance, speed, alone, _ = net_plots(NetResults(BurstCapacity(8, 1, 1), 1, [rows]))
    assert PLAIN not in acceptance.lines
    assert acceptance.lines[TRAINED] == [(40, 0.75)]
    assert (speed.lines[PLAIN], speed.lines[TRAINED]) == ([(40, 1.0)], [(40, 2.0)])
    assert alone.title == "trained / frozen: seconds of a core, of 50"
    assert alone.lines == {"spent": [(0, 0), (100, 0.4)], "saved": [(0, 0), (100, 1.0)]}
    write_plot(tmp_path / "p.svg", [acceptance, speed, alone])
    assert "of plain decoding" in (tmp_path / "p.svg").read_text()
    assert ElementTree.parse(tmp_path / "p.svg")  # noqa: S314 - our own file


def test_speed_up_over_the_load_has_medians_and_ranges_within_a_turn():
    def at(load, *gains):
        turns = [passes_of_ways(recall={"tokens": 400 * gain}) for gain in gains]
        return NetResults(BurstCapacity(8, 2.0, 10.0), 2 * load, turns)

    loads = [at(0.25, 1.5, 2.0, 1.75), at(0.5, 1.25)]
    table = load_table(loads)
    assert [(row[0], row[table.columns.index(RECALL)]) for row in table.rows] == [
        ("25%", "1.750 (1.500 to 2.000)"),
        ("50%", "1.250"),
    ]
    plot = load_plot(loads)
    assert plot.lines[PLAIN] == [(25, 1.0), (50, 1.0)]
    assert plot.lines[RECALL] == [(25, 1.75), (50, 1.25)]
    assert plot.bands[RECALL] == [(25, 1.5, 2.0), (50, 1.25, 1.25)]
    assert plot.top == 2.0
