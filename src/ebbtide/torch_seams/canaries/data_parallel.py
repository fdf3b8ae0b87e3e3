"""The canaries of ``data_parallel``: how a model learns of the wrapper around it, without any process group."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from ebbtide.torch_seams import data_parallel
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def a_wrapper_is_known_while_its_forward_runs() -> None:
    """Its buckets are as large as the gradients, and apart from them unless they are views of each other."""
    wrapper = object.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.module, wrapper.gradient_as_bucket_view = torch.nn.Linear(3, 2), False
    expect(data_parallel.bucket_bytes(wrapper.module) == 0, "a wrapper is known before it runs")
    with wrapper._inside_ddp_forward():
        expect(data_parallel.bucket_bytes(wrapper.module) == 32, "the wrapper that runs is not known")
        expect(data_parallel.bucket_bytes(torch.nn.Linear(3, 2)) == 0, "another module counts as being in it")
    expect(DistributedDataParallel._get_active_ddp_module() is None, "a wrapper is known after it has run")
    expect(data_parallel.bucket_bytes(wrapper.module) == 32, "a wrapper that has run is forgotten")
    wrapper.gradient_as_bucket_view = True
    weight, bias = wrapper.module.weight, wrapper.module.bias
    weight.grad, bias.grad = torch.zeros(2, 3), torch.zeros(2)
    expect(data_parallel.bucket_bytes(wrapper.module) == 32, "gradients with memory of their own pass for buckets")
    bucket = torch.zeros(8)
    weight.grad, bias.grad = bucket[:6].view(2, 3), bucket[6:]
    expect(data_parallel.bucket_bytes(wrapper.module) == 0, "buckets in which the gradients lie count twice")
