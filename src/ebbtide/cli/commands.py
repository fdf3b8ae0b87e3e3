"""The commands: one file each, one way to fail.

Standard output holds results alone, with ``--json`` one object; progress and messages go to standard error.
Exit codes: 0 done, 1 a promise was broken, 2 the request cannot be met as written, 130 stopped by Ctrl-C.

Commands check what they are given before they import torch: help and refusals come at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ebbtide.cli.calibrate import calibrate
from ebbtide.cli.compare import compare
from ebbtide.cli.demo import demo
from ebbtide.cli.doctor import doctor
from ebbtide.cli.machines import machines
from ebbtide.cli.max_batch import max_batch
from ebbtide.cli.plan import plan
from ebbtide.cli.refusals import in_words
from ebbtide.cli.report import report
from ebbtide.cli.show import show
from ebbtide.cli.start import interruptible
from ebbtide.errors import BudgetExceeded, EbbtideError, InternalError, VerificationError
from ebbtide.faults import RAISED_IN_CAPTURE
from ebbtide.planners.narration import INTERRUPTED
from ebbtide.report.text.terminal import on_terminal
from ebbtide.version import __version__

__all__ = ["app"]


_WORDS = "ebbtide.words"
_INSTEAD = {
    "sweep": "compare plans one step within several budgets: ebbtide compare CASE --budgets 80%,60% --planners auto",
    "explain": "ebbtide show PLAN --explain NAME tells of one tensor of a saved plan",
    "fit": "ebbtide.fit(model, budget) is for your training script; ebbtide plan CASE --budget 60% plans without it",
}
"""Functions of the API that are no commands, and what does that here."""


class _Group(TyperGroup):
    """Commands whose expected errors are one message and an exit code; all others keep their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember what was typed: a refusal may say how it would do."""
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was typed; of some that there are not it is said which one does that."""
        if args and args[0] in _INSTEAD:
            ctx.fail(f"No such command {args[0]!r}: {_INSTEAD[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            interruptible()
            return super().invoke(ctx)
        except InternalError:
            raise  # with its traceback, which belongs into a report
        except EbbtideError as error:
            print(in_words(error, ctx.meta.get(_WORDS, ())), file=on_terminal(sys.stderr))
            broken = isinstance(error, BudgetExceeded | VerificationError)
            raise typer.Exit(1 if broken else 2) from error
        except KeyboardInterrupt as error:
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(INTERRUPTED)]
            at = f" at this: {notes[-1].removeprefix(INTERRUPTED)}" if notes else " while it started"
            print(f"ebbtide: stopped by Ctrl-C{at}; there is no result yet", file=sys.stderr)
            raise typer.Exit(130) from error
        except Exception as error:
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(RAISED_IN_CAPTURE)]
            if not notes:
                raise
            print(f"ebbtide: the model's forward raises {type(error).__name__}: {error}\n{notes[0]}", file=sys.stderr)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In a list of commands the first sentence of a docstring would be cut off at the end of the line.
app.command(short_help="Train a small GPT under half of its peak and print the proof.")(demo)
app.command(short_help="Plan a training step under a budget, without running it.")(plan)
app.command(short_help="Hold several planners' plans of one step against each other.")(compare)
app.command(short_help="Find the largest batch whose training step fits a budget.")(max_batch)
app.command(short_help="Tell what takes a step's memory, and what would lower it.")(doctor)
app.command(short_help="Print a saved plan, or what it does with one tensor.")(show)
app.command(short_help="Write a report of a saved plan: one HTML page.")(report)
app.command(short_help="List the machines that plans can be for, with sources.")(machines)
app.command(short_help="Measure this machine and its disks, for later plans.")(calibrate)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback()
def _ebbtide(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train PyTorch models inside a byte budget, with the same numbers."""
