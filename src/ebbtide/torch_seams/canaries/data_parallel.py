"""The canaries of ``data_parallel``: how a model learns of the wrapper around it, without any process group."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Reducer
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


@canary
def a_rank_may_stand_in_for_its_part() -> None:
    """What torch's ``Join`` calls for ranks that have run out of data, on the wrapper and on its reducer."""
    names = ("_pre_forward", "_match_all_reduce_for_bwd_pass", "_check_sync_bufs_pre_fwd")
    expect(all(callable(getattr(DistributedDataParallel, each, None)) for each in names), "a wrapper has other parts")
    parts = ("_get_local_used_map", "_push_all_rebuilt_params", "_rebuild_buckets", "_get_zeros_like_grad_buckets")
    expect(all(hasattr(Reducer, each) for each in parts), "a reducer has other parts")
    wrapper = object.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.static_graph, wrapper.require_backward_grad_sync = False, True
    expect(data_parallel.exchanges_so_far(wrapper) == 0, "a wrapper without static_graph is asked for what it has not")
    expect(data_parallel.exchanges_gradients(wrapper), "a wrapper outside of no_sync does not exchange gradients")
    with torch.no_grad():
        expect(not data_parallel.exchanges_gradients(wrapper), "a forward without gradients exchanges some")
    wrapper.require_forward_param_sync, wrapper.forward_sync_buffers, wrapper.modules_buffers = True, True, []
    wrapper.find_unused_parameters = wrapper._has_rebuilt_buckets = False
    before = data_parallel.exchanges_before_forward
    expect(before(wrapper, exchanged=1), "the order of buckets is not exchanged before a forward")
    expect(not before(wrapper, exchanged=0), "an order of buckets is exchanged before there is one")
    wrapper.static_graph = True
    expect(before(wrapper, exchanged=2), "the order of buckets is not exchanged with static_graph")
    expect(not before(wrapper, exchanged=1), "the first backward of static_graph is to find an order of buckets")
    wrapper.modules_buffers = [torch.zeros(1)]
    expect(before(wrapper, exchanged=0), "buffers are not exchanged before a forward")
