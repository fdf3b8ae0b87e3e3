"""What is relied on of optimizers' hooks, and of stacks of other threads, where captures wait for steps."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ebbtide.torch_seams import compiling_flag
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def captures_wait_for_steps() -> None:
    """A capture waits while an optimizer steps in another thread, and not for a step that has raised."""
    stepping, told = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        raises = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            del closure
            if self.raises:
                raise ArithmeticError
            stepping.set()
            told.wait(60)

    def step(optimizer: Slow) -> None:
        try:
            optimizer.step()
        except ArithmeticError:
            stepping.set()

    def slow() -> Slow:
        made = Slow([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        made.register_step_pre_hook(lambda *_: compiling_flag.optimizer_steps())
        made.register_step_post_hook(lambda *_: compiling_flag.optimizer_has_stepped())
        return made

    def capture() -> None:
        with compiling_flag.while_nobody_steps():
            order.append("captured")

    order: list[str] = []
    threads = [threading.Thread(target=step, args=(slow(),)), threading.Thread(target=capture)]
    threads[0].start()
    stepping.wait(60)
    threads[1].start()
    threads[1].join(0.05)
    order.append("stepped")
    told.set()
    for each in threads:
        each.join()
    expect(order == ["stepped", "captured"], f"a capture and a step in another thread come as {order}")
    failing = slow()
    failing.raises = True
    thread = threading.Thread(target=step, args=(failing,))
    thread.start()
    thread.join()
    capture()
    expect(order[2:] == ["captured"], "a step that has raised is waited for")
