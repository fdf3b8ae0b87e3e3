"""Linear algebra that raises on what it finds: its check as an op that returns a tensor.

``linalg.inv``, ``solve`` or ``cholesky`` look at what LAPACK says of their matrices and raise. Such a check returns
nothing, and AOTAutograd threads a token through the graph for it, which it counts among inputs and outputs. Here it
stands in the graph as an op on its own (``torch_seams.aot.without_tokens``), and becomes one with a result, so that
it is an op of the program like any other: it runs once, where it stood.
"""

from __future__ import annotations

import torch
from torch import fx

from ebbflow.torch_seams.fake_tensors import mode_of

__all__ = ["keep_error_checks"]

_CHECK = torch.ops.aten._linalg_check_errors.default


@torch.library.custom_op("ebbflow::linalg_check", mutates_args=())
def linalg_check(info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    """A tensor of no elements, unless ``info`` says that ``name`` failed."""
    _CHECK(info, name, is_matrix=is_matrix)
    return info.new_empty(0)


@linalg_check.register_fake
def _(info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    return info.new_empty(0)


def keep_error_checks(graph: fx.Graph) -> None:
    """Let every check of ``graph`` be an op with a result."""
    for node in graph.find_nodes(op="call_function", target=_CHECK):
        info, name = node.args
        with graph.inserting_before(node):
            check = graph.call_function(
                torch.ops.ebbflow.linalg_check.default, (info, name, bool(node.kwargs["is_matrix"]))
            )
        check.meta.update(node.meta)
        value = info.meta["val"]
        with mode_of(value):
            check.meta["val"] = value.new_empty(0)
        graph.erase_node(node)
