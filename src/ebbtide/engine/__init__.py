"""How planned steps run: from a call of a fitted model to its two graphs. Read ``loop`` first.

The way of a call:

- ``fitted_class``: the class of a fitted model; whoever calls it and however, its training calls come to the loop.
- ``loop``: look, capture, plan, lower, prove, run, from top to bottom; ``attempts``: why a call goes round once more.
- ``call_context``: what surrounds a call; ``key``: what tells one call's step from another's.
- ``validity``: what a plan rests on, what a call asks of it (``demands``), and the first thing in which they differ.
- ``plans``: the plan for a call; ``refinement``: a better one that is looked for beside training;
  ``given``: one that the user gave; ``retained``: room for graphs that are retained;
  ``reserve``: what a budget keeps free; ``resident_by_kind``: what is resident, for refusals and plans.
- ``in_pieces``: steps of several graphs, under one budget: ``running_call`` is one of them, ``traced_pieces`` its
  parts, ``stitched_plan`` what they become in a plan.
- ``executor``: what AOTAutograd calls to run a forward and its backward.

What is known of a model:

- ``model``: the parts, and who writes each; ``configuration``: how it was fitted, and what is asked of it.
- ``captured_steps``: its steps; ``shared_calls``: which calls share a capture; ``step``: one step and its plans.
- ``piece``: a captured graph and its inputs; ``compiled``: the capture of a call.
- ``traced_graph``: a joint graph that is kept; ``stubs``: what AOTAutograd is given.
- ``executable``: a plan that can run; ``step_code``: its code; ``first_runs``: what is proven and measured of that.
- ``learned``: what runs have taught: ``user_window`` and ``known_windows``, between forward and backward, where
  ``clearing`` finds out whether old gradients go; ``after``, when the backward has returned. ``judging``: whether a
  step stayed within its budget, and what follows if not.
- ``optimizer_link``: the optimizers that train it; ``calls``: how its calls went, and training past the model.
- ``alike``: what has to be the same on all ranks that train it.
- ``pending_steps``: forwards whose backward has not come; ``step_handles``: how a backward finds its forward.

What has to be as in eager:

- ``hook_order`` and ``gradient_watcher``: when gradients reach parameters, and which backwards made them.
- ``tangent_layouts``: gradients of outputs that arrive in other memory layouts than were traced.
- ``shared_gradients``: sums of gradients that eager adds up in another order, which is said.
- ``unused``: gradients that no used output depends on; ``partial_backward``: backwards for some of the gradients.
- ``snapshot``: what a failed proof puts back.
- ``copies``: copies and pickles, which are plain models.
- ``derivatives``, ``linked_outputs``, ``offload_hooks`` and ``sharded``: what no step has, refused by name;
  ``frozen``: a loss that takes no gradient; ``freed_graphs``: calls that free their own graph.
"""
