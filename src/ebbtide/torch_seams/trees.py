"""Nested containers of arguments and results: ``torch.utils._pytree``.

Relied on: tuples, lists, dictionaries and registered classes are containers, everything else is a leaf; leaves come in
a fixed order; the structure's ``str`` is the same for the same nesting. The public ``torch.utils.pytree`` of newer
releases knows another set of registered classes, so the module that AOTAutograd itself uses is taken.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
