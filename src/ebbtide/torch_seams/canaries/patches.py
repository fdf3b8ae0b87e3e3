"""The canary of ``patches``: who sees a setting that is changed for a while."""

from __future__ import annotations

import threading

from ebbtide.torch_seams.canaries.registry import canary, expect
from ebbtide.torch_seams.patches import Setting, patched

__all__: list[str] = []


@canary
def settings_are_told_apart() -> None:
    """A changed setting is seen by another thread exactly where it is not a thread's own."""
    from torch._functorch import config

    seen: list[object] = []
    before = config.donated_buffer
    setting = Setting(config, "donated_buffer")
    with patched(setting, not before):
        expect(config.donated_buffer is not before, "a setting that was changed is as before")
        thread = threading.Thread(target=lambda: seen.append(config.donated_buffer))
        thread.start()
        thread.join()
    expect(config.donated_buffer is before, "a setting was not put back")
    expect((seen == [before]) is setting.is_of_thread, "another thread sees what it should not, or the other way round")
