"""`slotline completion`: what a shell needs to complete verbs, options and ids of jobs with the Tab key."""

from __future__ import annotations

import os
from enum import StrEnum

import typer
from typer.completion import completion_init, get_completion_script

PROGRAM = "slotline"
_VARIABLE = "_SLOTLINE_COMPLETE"
app = typer.Typer()


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(shell: Shell) -> None:
    """Print the script that makes this shell complete: eval "$(slotline completion bash)" in ~/.bashrc, say."""
    print(get_completion_script(prog_name=PROGRAM, complete_var=_VARIABLE, shell=shell))


def answer_shells() -> None:
    """Let the command answer that script, which calls it with a variable set at every Tab."""
    if _VARIABLE in os.environ:
        completion_init()
