"""Both dialects of published graphs, topological order, and what malformed files are told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import UsageError
from ebbtide.step.graph_file import program_from_graph
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule


def network(**changes: Any) -> dict[str, Any]:
    """Two forward and two backward nodes in Checkmate's dialect."""
    rows = [("a", 10, 100, False), ("b", 20, 200, False), ("b_back", 40, 200, True), ("a_back", 20, 100, True)]
    nodes = [{"id": i, "name": n, "cost_cpu": c, "cost_ram": r, "backward": b} for i, (n, c, r, b) in enumerate(rows)]
    pairs = [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)]
    data = {
        "directed": True,
        "multigraph": False,
        "graph": {"name": "tiny"},
        "nodes": nodes,
        "links": [{"source": s, "target": t} for s, t in pairs],
    }
    return data | changes


def layered() -> dict[str, Any]:
    """Three nodes in the random layered dialect; the file lists the last one second."""
    return {
        "nodes": [
            {"name": 0, "duration": 3, "out_cost": 7},
            {"name": 1, "duration": 5, "out_cost": 11},
            {"name": 2, "duration": 2, "out_cost": 13},
        ],
        "links": [{"0": 0, "1": 2}, {"0": 2, "1": 1}, {"0": 0, "1": 1}],
    }


def test_a_network_becomes_ops_with_one_buffer_each() -> None:
    program = program_from_graph(network())
    assert program.name == "tiny"
    assert [op.name for op in program.ops] == ["a", "b", "b_back", "a_back"]
    assert [op.inputs for op in program.ops] == [(), (0,), (0, 1), (0, 2)]
    assert [op.outputs for op in program.ops] == [(0,), (1,), (2,), (3,)]
    assert [op.seconds for op in program.ops] == [10, 20, 40, 20]
    assert [buffer.bytes for buffer in program.buffers] == [100, 200, 200, 100]
    assert (program.boundary, program.gradients) == (2, (3,))


def test_the_peak_counts_a_node_with_its_inputs() -> None:
    program = program_from_graph(network())
    assert simulate(program, unplanned_schedule(program)).above_bytes == 100 + 200 + 200


def test_a_layered_graph_is_put_in_order() -> None:
    program = program_from_graph(layered(), name="layers")
    assert program.name == "layers"
    assert [op.name for op in program.ops] == ["0", "2", "1"]
    assert [op.inputs for op in program.ops] == [(), (0,), (0, 1)]
    assert [buffer.bytes for buffer in program.buffers] == [7, 13, 11]
    assert (program.boundary, program.gradients) == (0, (2,))


def test_edges_is_another_name_for_links() -> None:
    data = network()
    data["edges"] = data.pop("links")
    assert program_from_graph(data) == program_from_graph(network())


def test_parallel_edges_are_one_read() -> None:
    data = network()
    data["links"] = [link | {"key": key} for link in data["links"] for key in (0, 1)]
    assert program_from_graph(data) == program_from_graph(network())


def test_sizes_are_rounded_up() -> None:
    data = network()
    data["nodes"][0]["cost_ram"] = 99.25
    assert program_from_graph(data).buffers[0].bytes == 100


def test_a_graph_without_a_name_is_called_graph() -> None:
    assert program_from_graph({key: value for key, value in network().items() if key != "graph"}).name == "graph"


def broken(part: str, position: int, **changes: Any) -> dict[str, Any]:
    data = network()
    row = data[part][position] | changes
    data[part][position] = {key: value for key, value in row.items() if value is not None}
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], ["list", "node-link"]),
        ({}, ["'nodes'", "node-link"]),
        (network(nodes="abc"), ["'nodes'"]),
        (network(nodes=[]), ["no nodes"]),
        (network(nodes=[7]), ["entry 0", "7"]),
        (network(links=None), ["'links' or 'edges'"]),
        (broken("nodes", 1, id=None, name=None), ["node number 1", "'id'"]),
        (broken("nodes", 1, id=0), ["node 0", "twice"]),
        (broken("nodes", 2, cost_cpu=None), ["node 2", "'cost_cpu'", "'duration'"]),
        (broken("nodes", 2, cost_ram=-1), ["node 2", "cost_ram = -1"]),
        (broken("nodes", 2, cost_ram="big"), ["node 2", "'big'"]),
        (broken("nodes", 2, cost_cpu=float("nan")), ["node 2", "nan"]),
        (broken("nodes", 2, cost_cpu=True), ["node 2", "True"]),
        (broken("links", 0, source=9), ["node 9", "not in 'nodes'"]),
        (broken("links", 0, target=None), ["no 'target'"]),
        (broken("links", 0, source=1), ["node 1", "itself"]),
        (broken("links", 0, source=3, target=0), ["node 0", "cycle"]),
    ],
)
def test_a_malformed_graph_is_refused_by_name(data: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        program_from_graph(data)
    for word in words:
        assert word in str(caught.value)


@st.composite
def shuffled_graphs(draw: st.DrawFn) -> dict[str, Any]:
    """An acyclic graph whose nodes and edges come in any order under any ids, with parallel edges."""
    count = draw(st.integers(1, 12))
    ids = draw(st.permutations(range(count)))
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=30))
    nodes = [{"id": f"n{i}", "duration": draw(st.integers(0, 9)), "out_cost": i} for i in ids]
    links = [{"source": f"n{min(p)}", "target": f"n{max(p)}"} for p in pairs if p[0] != p[1]]
    return {"nodes": nodes, "links": links}


def test_the_graphs_own_order_goes_before_the_files() -> None:
    data = layered() | {"nodes": [{"name": n, "duration": 1, "out_cost": 1} for n in range(4)]}
    data |= {"links": [{"0": 0, "1": 3}]}
    assert [op.name for op in program_from_graph(data).ops] == ["0", "1", "2", "3"]
    data["graph"] = {"order": [2, 3, 0]}
    assert [op.name for op in program_from_graph(data).ops] == ["2", "0", "3", "1"]


@pytest.mark.parametrize(
    ("order", "reason"),
    [("0123", "not a list"), ([0, 9], "names node 9, which is not"), ([1, 0, 1], "names node 1 twice")],
)
def test_an_order_that_is_none_is_refused(order: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        program_from_graph(layered() | {"graph": {"order": order}})


@given(shuffled_graphs())
def test_any_order_of_nodes_gives_a_topological_program(data: dict[str, Any]) -> None:
    program = program_from_graph(data)
    names = [op.name for op in program.ops]
    assert sorted(names) == sorted(node["id"] for node in data["nodes"])
    place = {name: index for index, name in enumerate(names)}
    edges = {(link["source"], link["target"]) for link in data["links"]}
    assert all(place[source] < place[target] for source, target in edges)
    assert sum(len(op.inputs) for op in program.ops) == len(edges)
    assert {buffer.name: buffer.bytes for buffer in program.buffers} == {f"n{i}": i for i in range(len(names))}


@given(shuffled_graphs())
def test_an_order_that_is_topological_is_kept(data: dict[str, Any]) -> None:
    once = [op.name for op in program_from_graph(data).ops]
    rows = {node["id"]: node for node in data["nodes"]}
    again = program_from_graph(data | {"nodes": [rows[name] for name in once]})
    assert [op.name for op in again.ops] == once
