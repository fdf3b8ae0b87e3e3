"""Every private or half-private name of torch that Ebbtide uses, and nothing else knows one.

Torch promises nothing about a name that begins with an underscore or lies in a module that does, about attributes of
its internal classes, or about what its compiler writes on nodes. Ebbtide needs some of them. Each is used here only, by
a function or class that says what is relied on and how torch's versions differ; ``canaries`` exercises each; and
whatever replaces something of torch for a while does so by ``patches.py``, which always puts it back.

Operators (``torch.ops.aten._softmax``) are not among these names: a captured graph consists of them, and programs and
plans name them. Nor is ``node.meta["val"]``, which torch.export documents; a canary exercises it all the same.

Where a docstring says nothing about versions, no difference between 2.11.0, 2.12.0, 2.13.0 and 2.14.1 is known; the
canaries, the numerics tier and the demo run on each (``benchmarks/results/torch-*``). What differs is asked of torch
itself, by a name that is there or by what it does, and not of its version number.
"""
