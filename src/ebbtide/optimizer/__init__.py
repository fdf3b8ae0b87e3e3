"""All that Ebbtide knows of the optimizer of a fitted model.

``state`` is what an optimizer keeps and will keep, ``cost`` what its step takes while it runs, ``in_step`` the
optimizer that steps in the backward (``step="inside"``), ``offload`` its state on a slower tier
(``offload_optimizer=True``).
"""
