"""Statements that are known to break a step's graph, and what to write instead: better than what the compiler says.

A break is told by the compiler's words and the user's line; the first entry that knows it has the word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ebbtide.capture.known_libraries import known_library
from ebbtide.torch_seams.context_variables import STAYS_SET
from ebbtide.torch_seams.input_branches import TELLS_NAN
from ebbtide.torch_seams.numpy_numbers import WITH_ARRAYS
from ebbtide.torch_seams.reentrant import CUT
from ebbtide.torch_seams.storages import buffer_table
from ebbtide.torch_seams.tracing import PYTHON_DRAWS
from ebbtide.user_objects import attributes_of

__all__ = ["FREES_GRAPH", "LAUNCHES_AS_OPS", "NESTED", "READ_PLACE", "is_only_in_traces", "known_break"]

LAUNCHES_AS_OPS = (
    "Register what launches it as an op (torch.library.custom_op with register_fake and register_autograd, or "
    "torch.library.triton_op), which is then planned as a whole; a library's kernels that are not registered, such as "
    "Liger's, are to be left off"
)
"""What to do about kernels that are launched inside of a model."""

FREES_GRAPH = (
    "torch.autograd.grad in the forward frees the graph of a tensor that the forward returns, which cannot be trained "
    "then: eager's backward raises as well.",
    "Pass create_graph=True, or retain_graph=True where the gradient itself is not trained; for numbers alone call the "
    "model in eval mode (eval()), where such a call runs as it is, or return the tensor detached",
)
"""Why a training call is not planned that frees its own graph, and what to write instead."""

READ_PLACE = (
    "It indexes by a number that it reads from a tensor (int(), item()), so that the step depends on data.",
    "Index by a tensor, which needs no number: places = (pointer + torch.arange(n)) % size, then "
    "queue[:, places] = keys, and queue[:, places] to read; or do it after the call, outside of the forward",
)
"""Why a step is not planned that indexes by a number from a tensor, and what to write instead."""

_DRAW_OUTSIDE = (
    "Draw before the call, give the forward a tensor, and choose by it without a branch, "
    "torch.where(drawn < rate, a, b), so that one plan serves all; or draw with torch's own generator "
    "(torch.rand(()), F.dropout)"
)
_DRAWN = "It draws random numbers with {}, and a captured step repeats the draws of torch's default generators only."


NESTED = (
    "A nested tensor is several tensors in one, and which of its parts take gradients is not told in a step's graph.",
    "Give the forward one padded tensor and a mask (torch.nested.to_padded_tensor(x, 0.0)), or the rows in a row and "
    "where each sequence begins as two tensors (x.values(), x.offsets() of a jagged one)",
)
"""Why a step with a nested tensor is not planned, and what to give instead."""


@dataclass(frozen=True)
class _Break:
    """What the compiler says (``words``), the user's line where that is needed to know (``line``), and our words."""

    words: str
    reason: str
    remedy: str
    line: str = ""


_COUNTS_BATCHES = (
    "A batch norm with momentum=None reads how many batches it has seen, a number in a tensor.",
    "Give it a number (momentum=0.1)",
)
_CLASS_METHODS = _Break(
    r"Too many positional arguments|failed to bind arguments|___check_obj_id\(.*\.(forward|setup_context|backward)\b",
    "A method of the torch.autograd.Function is a class method, which torch's compiler takes for a static one, or it "
    "is given more arguments than it takes.",
    "Make forward, setup_context and backward static methods (@staticmethod)",
    line=r"\.apply\(",
)
_OF_FUNCTIONS = (
    _CLASS_METHODS,
    _Break(
        r"lift_tracked_freevar|torch\.autograd\.backward|\.backward\(",
        "The backward of a torch.autograd.Function adds up gradients in tensors (.backward()), which does not become "
        "part of one graph.",
        "Have the gradients returned: torch.autograd.grad(outputs, inputs, gradient), of all that takes one; give it "
        "the parameters as arguments of apply",
        line=r"(?s), in backward\b.*backward\(",
    ),
    _Break(
        r"autograd\.functional|argument of type",
        "torch.autograd.functional does not become part of one graph.",
        "Call torch.func.vjp, torch.func.jvp or torch.autograd.grad, which do",
        line=r"functional\.\w+\(",
    ),
    _Break(
        r"custom jvp",
        "A torch.autograd.Function has a forward derivative of its own (jvp), with which torch's compiler takes none. "
        "A training step has no use for it.",
        "Apply a subclass without it in the planned model (class Plain(TheFunction): "
        "jvp = torch.autograd.Function.jvp)",
        line=r"\.apply\(",
    ),
    _Break(
        r"mark_dirty input not returned",
        "A torch.autograd.Function marks an argument as changed (mark_dirty) and returns it by another name.",
        "Return the argument itself: x.mul_(2), ctx.mark_dirty(x), return x",
    ),
    _Break(
        r"hasattr",
        "It gives the apply of a torch.autograd.Function to torch.vmap itself.",
        "Give it a function that calls apply: torch.vmap(lambda *rows: TheFunction.apply(*rows))",
        line=r"vmap\(.*\.apply\b",
    ),
    _Break(
        r"Unsafe side effect|setattr\(\) on unsupported type",
        "A layer of bitsandbytes sets itself up in its first call, here inside of a checkpoint.",
        "Call the model once before, as it will be trained, under torch.no_grad(); or leave the checkpoints out "
        "(model.gradient_checkpointing_disable(), prepare_model_for_kbit_training(model, "
        "use_gradient_checkpointing=False)), whose place a budget takes",
        line=r"[/\\]bitsandbytes[/\\]",
    ),
    _Break(
        r"Unsafe side effect|setattr\(\) on unsupported type",
        "A torch.autograd.Function, or a function that is given to another one of torch's (a checkpoint, vmap), "
        "changes a list, an attribute or another object of Python.",
        "Let it compute tensors and return them, and do the rest outside of the forward",
    ),
)
_OF_KINDS = (
    _Break(
        r"Attempted to wrap sparse Tensor|sparse_\w+_tensor|Sparse(Csr|Csc|Bsr|Bsc)Tensor|to_sparse",
        "It reads or makes a sparse tensor, which becomes part of no graph of torch's compiler.",
        "Give the forward copies of its index and values (of adj.to_sparse_coo().coalesce() indices().clone() and "
        "values().clone()) and add up rows: torch.zeros_like(x).index_add(0, rows, values[:, None] * x[columns]); or "
        "make it dense before the call (adj.to_dense())",
    ),
    _Break(
        r"meta converter nyi|as_strided\.default at dispatch key \w+\.Sparse",
        "It reads the index or the values of a sparse tensor, which share its memory.",
        "Give the forward copies of them (adj.indices().clone(), adj.values().clone())",
    ),
    _Break(r"Attempted to wrap strided NestedTensor", *NESTED),
    _Break(r"", *NESTED, line=r"\bnested\.(as_)?nested_tensor\("),
    _Break(
        r"quantized nyi",
        "It reads a quantized tensor (torch.quantize_per_tensor), which torch's compiler takes into no graph.",
        "Dequantize it before the call (x.dequantize()), or keep integers and a scale and multiply in the forward",
    ),
)
_ASIDE = (
    _Break(
        r"builtin operator `print`|method `write(lines)?` of class",
        "It prints or writes while it runs.",
        "Leave it out of the forward, or return what is to be printed, detached (x.detach()), and print it after the "
        "call",
    ),
    _Break(
        r"Logg",
        "It makes a logger while it runs.",
        "Make it outside of the forward (logger = logging.getLogger(__name__)); what a planned step logs is left out",
        line=r"getLogger\(",
    ),
    _Break(
        r"the builtin `time\.(?!sleep)|method `(now|utcnow|today)` of class",
        "It reads the clock, which a plan reads no second time.",
        "Read the clock before and after the call",
    ),
    _Break(
        r"FakeQuantize\w*\.forward",
        "A FakeQuantize module of torch.ao is kept out of graphs by torch.",
        "Call the op: torch.fake_quantize_per_tensor_affine(x, scale, zero_point, quant_min, quant_max), with the "
        "module's scale and zero_point; its observer may look at what the forward returns, after the call",
    ),
    _Break(
        r"tolist\(\) with non-integer tensor",
        "It reads numbers from a tensor into a Python list.",
        "Keep the tensor (x.detach()), or return it, and read it after the step; to compute with it, stay with tensors",
    ),
    _Break(
        r"UserDefinedObjectVariable\(generator\)",
        "It iterates over a generator that it is given, which can be read but once.",
        "Pass a list or a tuple (list(batches))",
    ),
)
_COVARIANCE = _Break(
    r"aten\.equal",
    "torch.cov and torch.corrcoef look at a number on the way (whether a divisor is zero).",
    "Write it out: c = x - x.mean(1, keepdim=True), then c @ c.T / (x.shape[1] - 1) is torch.cov(x), and with "
    "c = F.normalize(c, dim=1) first, c @ c.T is torch.corrcoef(x)",
    line=r"\b(cov|corrcoef)\(",
)
_INDEXED = _Break(r"valid indices \(got SymInt\)", *READ_PLACE)
_ON_FAKE = r"Cannot access data pointer of Tensor"
_BREAKS = (
    _Break(
        r"Could not guard[\s\S]*in multi_head_attention_forward",
        "Torch's Transformer layers compare a mask with a causal one, to see whether it is that.",
        "Tell them: is_causal=True beside the mask (tgt_is_causal= of a decoder), or False if it is another",
    ),
    *_OF_KINDS,
    _INDEXED,
    *_ASIDE,
    _COVARIANCE,
    _Break(
        CUT,
        "A reentrant checkpoint over arguments without gradients trains nothing, and it returns no plain tensor.",
        "Call checkpoint(..., use_reentrant=False), which trains what is in it, or let its function return tensors",
    ),
    _Break(
        WITH_ARRAYS,
        "NumPy computes an array with a number of its own in the wider of their types, and torch in the array's.",
        "Keep such numbers as Python's (float(weight)) or in the array's type, outside of the forward",
    ),
    _Break(
        _ON_FAKE,
        "It launches a kernel that needs values, and a step is traced with fake tensors, which have shapes alone.",
        LAUNCHES_AS_OPS,
    ),
    _Break(
        r"-packages[/\\](triton|liger_kernel)[/\\]",  # a frame of the user's, not always the innermost
        "It launches a Triton kernel from code that does not become part of one graph.",
        LAUNCHES_AS_OPS,
    ),
    _Break(
        "",
        "It puts a hook or a parametrization on a module, or takes one off, while it runs.",
        "Do that before the call (PEFT's X-LoRA, Poly and LoRA with target_parameters do it in every call)",
        line=r"\b(register_(forward|full_backward|backward)\w*hook|register_parametrization|remove_parametrizations)\(",
    ),
    _Break(
        r"mutate tensor data attribute to different|set_ on a graph input",
        "It gives a parameter, a buffer or an argument another tensor's data (parameter.data = ...) while it runs.",
        "Call the model once before, as it will be trained, under torch.no_grad(): bitsandbytes' layers cast their "
        "bias once. Its 4-bit layers pack their weights when called in eval mode on a CPU: have them in training mode "
        "(train())",
        line=r"[/\\]bitsandbytes[/\\]",
    ),
    _Break(
        r"mutate tensor data attribute to different|set_ on a graph input",
        "It gives a parameter, a buffer or an argument another tensor's data (parameter.data = ...) while it runs.",
        "Do it before the call",
    ),
    _Break(
        r"modified by an inplace operation",
        "It changes in place something that its own backward needs as it was; eager's backward refuses that as well.",
        "Change a copy (clone()), or use the operator that is not in place",
    ),
    _Break(
        r"[Dd]ata-dependent|Could not guard|item\(\)",
        *_COUNTS_BATCHES,
        line=r"num_batches_tracked",
    ),
    _Break(
        TELLS_NAN,
        "It compares a number with itself, to tell a NaN, and that number is computed in the step.",
        "Look for NaN after the call (torch.isnan(loss)), or without a branch (torch.where)",
    ),
    _Break(
        STAYS_SET,
        "It sets a context variable that is still set when the call returns.",
        "Reset it before (token = variable.set(...); variable.reset(token)), or set it outside of the call",
    ),
    _Break(
        r"class `ContextVar`|ContextVar\(",
        "It reads a context variable that has no value.",
        "Give the variable a default where it is made (ContextVar(name, default=None)), or a value before the call",
    ),
    _Break(
        r"kl_divergence|'generator'",
        "torch.distributions looks for the formula of two kinds of distributions when it first meets them, in a way "
        "that cannot be traced, and remembers it from then on.",
        "Call kl_divergence once on distributions of these kinds before the model is called",
        line=r"kl_divergence",
    ),
    _Break(
        r"fork_rng|is_compiling|data-dependent|Data-dependent|get_state|context manager",
        "It forks or sets the random state while it runs.",
        "Draw outside of the forward and give it the values as a tensor, or as a buffer where they are the same in "
        "every call; or fork around the call of the model",
        line=r"fork_rng|set_rng_state",
    ),
    _Break(
        r"seed",
        "It seeds torch's random numbers while it runs.",
        "Seed before the call of the model (torch.manual_seed), which draws what it would have drawn",
        line=r"torch\.(random\.)?(manual_seed|seed)\(|torch\.cuda\.(manual_seed|seed)",
    ),
    _Break(
        r"",
        "It changes settings of one of torch's backends while it runs.",
        "Change them around the call of the model; each setting is a step of its own",
        line=r"backends\.(\w+\.)+(flags|set_flags)\(",
    ),
    _Break(
        r"",
        "A hook that it puts on a tensor (register_hook) does something that is no part of one graph: it changes a "
        "list, an attribute or another object of Python.",
        "Let the hook do no more than compute the gradient that it returns, or put it on what the call returns or on a "
        "parameter, outside of the forward",
        line=r"register_hook\(",
    ),
    _Break(
        rf"{PYTHON_DRAWS}|Random\.\w+|method `\w+` of class `Random`", _DRAWN.format("Python's random"), _DRAW_OUTSIDE
    ),
    _Break(
        r"use_numpy_random_stream|torch\._numpy\.random|RandomState|numpy\.random|of class `Generator`",
        _DRAWN.format("NumPy"),
        _DRAW_OUTSIDE,
    ),
    _Break(r"numpy", _DRAWN.format("NumPy"), _DRAW_OUTSIDE, line=r"\brandom\b|\brng\b"),
    _Break(
        r"as_proxy\(\)|torch\.Generator|class `Generator`|Generator",
        _DRAWN.format("a torch.Generator"),
        _DRAW_OUTSIDE,
        line=r"generator|Generator|manual_seed",
    ),
    _Break(
        r"",
        "torch.combinations selects what it returns by a mask, so that its size looks as if it depended on data.",
        "Index, do not mask: i, j = torch.triu_indices(n, n, 1), and torch.stack([x[i], x[j]], 1) are the pairs",
        line=r"\bcombinations\(",
    ),
    _Break(
        r"returning intermediate with requires_grad_",
        "It returns or keeps a tensor on which it called requires_grad_(), whose own gradient would be lost.",
        "Return it detached (detach()), or make it outside of the forward and give it as an argument",
    ),
    _Break(
        r"requires_grad_\(\) call|Tensor\.requires_grad|requires_grad",
        "It changes requires_grad of a parameter or of an argument while it runs.",
        "Set it before the call: a step is captured anew for what takes a gradient, once each. On an intermediate "
        "result, set it to True, or call requires_grad_()",
        line=r"requires_grad",
    ),
    _Break(
        r"non-contiguous `out=`",
        "It is in TRL's fused head, which writes its tiles in place.",
        "Give TRL's trainer the callback (callbacks=[ebbtide.integrations.hf.MemoryBudget(budget)]), which has it "
        "planned as one op",
        line=r"hidden_chunk",
    ),
    _Break(
        r"",
        "It runs a hook of accelerate's that accelerate keeps out of compilation: one that moves weights, or several "
        "in a row (SequentialHook).",
        "Take it off (accelerate.hooks.remove_hook_from_module); of several, make one ModelHook that does what they do",
        line=r"wrapper\._compiled_fn\b",
    ),
    *_OF_FUNCTIONS,
    _Break(r"autograd\.grad consumed returned tensor's grad_fn", *FREES_GRAPH),
    _Break(
        r"autograd\.grad|torch\.autograd\.backward|\.backward\(",
        "It takes a gradient inside of the forward in a way that does not become part of one graph.",
        "Call torch.autograd.grad(..., create_graph=True) on what the forward itself computed from its arguments, or "
        "use torch.func.grad",
        line=r"grad\(|backward\(",
    ),
    _Break(
        r"[Dd]ata-dependent|branching|Could not guard",
        "It asserts something about values of tensors in a way that needs them in Python.",
        "Make the condition one tensor and the message a constant, and the assertion is part of the step "
        "(assert torch.isfinite(x).all(), 'not finite'), or check it outside of the forward",
        line=r"\bassert\b|torch\._assert\(|torch\._check\w*\(",
    ),
)
_TO_INDEX = _Break(
    r"extract specialized integer",
    "It indexes by a tensor without dimensions, which is a number that only the data tell.",
    "Select by a tensor of one dimension: x[:, i] is x.index_select(1, i.reshape(1)).squeeze(1), for i from 0 on",
    line=r"^$|^(?!.*(\.item\(|int\(|tolist\(|range\()).*\[[^\]]*[A-Za-z_]",
)
_CHOOSE_BY_VALUE = (
    "Choose by value instead of by branch (torch.where(condition, a, b)), or take the condition from what is known "
    "before the call, and give the forward a Python bool"
)
_BREAKS += (
    _TO_INDEX,
    _Break(
        r"aten\.(equal|allclose)",
        "It asks whether tensors are equal, which only the data tell.",
        f"{_CHOOSE_BY_VALUE}; (a == b).all() is a condition",
    ),
    _Break(
        r"[Dd]ata-dependent|branching|Could not guard",
        "It branches on a value that the step computes.",
        _CHOOSE_BY_VALUE,
        line=r"^(?!.*(tolist|\.shape|\.size\(|len\()).*, in [^:]*: .*\b(if|elif|while|and|or|not)\b",
    ),
)
_BRANCH = re.compile(r"[Dd]ata-dependent|branching")
_LAYERDROP = re.compile(r"layer_?drop|drop_?path|drop_prob|dropout_prob|skip_the_layer|stochastic_depth")


def known_break(said: str, line: str, module: torch.nn.Module) -> tuple[str, str] | None:
    """Reason and remedy for a break, or ``None`` if it is none of these.

    Args:
        said: the compiler's words.
        line: the user's line with its code; empty if it is not known.
        module: whose call it is.
    """
    if _BRANCH.search(said) and (_LAYERDROP.search(line) or ("skip" in line and any(_rates(module)))):
        return _layerdrop(module)
    if (of_library := known_library(said)) is not None:
        return of_library
    for each in _BREAKS:
        if re.search(each.words, said) and re.search(each.line, line):
            return each.reason, each.remedy
    # The line is the user's; that of a batch norm in a Sequential is torch's.
    if re.search(r"[Dd]ata-dependent|Could not guard|item\(\)", said) and any(map(_counts_batches, module.modules())):
        return _COUNTS_BATCHES
    return None


def is_only_in_traces(said: str, line: str) -> bool:
    """Whether what a trace would raise at ``line`` is no error of the model's: eager's call may well be right."""
    if re.search(_ON_FAKE, said) is not None:
        return True
    return re.search(_CLASS_METHODS.words, said) is not None and re.search(_CLASS_METHODS.line, line) is not None


def _counts_batches(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a batch norm whose momentum is how many batches it has seen."""
    counts = attributes_of(module).get("momentum", 0.0) is None and module.training
    return counts and buffer_table(module).get("num_batches_tracked") is not None


def _layerdrop(module: torch.nn.Module) -> tuple[str, str]:
    fields = sorted(set(_rates(module)))
    named = f" ({', '.join(fields)})" if fields else ""
    return (
        "Whether a layer runs is drawn in every step (layerdrop), and each pattern of layers is a graph of its own.",
        f"Make the model with a rate of 0{named}: then all layers run and the step is planned",
    )


def _rates(module: torch.nn.Module) -> Iterator[str]:
    """The fields that say how often layers are left out, of the model's configuration or else of its modules."""
    config = attributes_of(module).get("config")
    read: Callable[[object], Iterator[str]] = lambda owner: (  # noqa: E731
        f"{name}={value}"
        for name, value in attributes_of(owner).items()
        if re.search(r"layer_?drop", name) and isinstance(value, float) and value > 0
    )
    found = [f"config.{each}" for each in read(config)]
    yield from found or (each for one in module.modules() for each in read(one))
