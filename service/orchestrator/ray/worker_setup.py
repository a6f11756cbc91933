"""Stands in for the Python interpreter of a local Ray: `python -S -E worker_setup.py ARGUMENTS`.

Ray starts each worker by an interpreter that imports all of Ray (a third of a second of processor) to set an environment
and run the interpreter of the worker. Here the same is done by one that imports next to nothing. Whatever else Ray runs
with its interpreter, and what this does not know, the interpreter itself runs in this process's place.
"""

import json
import os
import re
import shlex
import sys

_SETUP = os.path.join("ray", "_private", "workers", "setup_worker.py")
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language=PYTHON"
_KNOWN = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}


def main() -> None:
    """Run the arguments as Ray's own interpreter would."""
    words = worker_command(sys.argv[1:], os.environ)
    if words is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    os.execvp("bash", ["bash", "-c", " ".join(words)])


def worker_command(arguments, environment):
    """The words of a shell that run the worker of such a command of Ray's, whose variables are then in `environment`; None,
    and nothing changed, for any other command."""
    if not arguments or not arguments[0].endswith(os.path.sep + _SETUP) or _LANGUAGE not in arguments:
        return None
    given = [word for word in arguments if word.startswith(_CONTEXT)]
    try:
        context = json.loads(given[0].removeprefix(_CONTEXT) or "{}") if given else {}
    except ValueError:
        return None
    if len(given) > 1 or not isinstance(context, dict) or context.keys() - _KNOWN:
        return None
    if context.get("override_worker_entrypoint") or context.get("java_jars"):
        return None
    for name, value in (context.get("env_vars") or {}).items():
        expanded = os.path.expandvars(value)
        environment[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", expanded)
    left = [word for word in arguments[1:] if word not in {*given, _LANGUAGE}]
    interpreter = context.get("py_executable") or sys.executable
    return [*(context.get("command_prefix") or ()), "exec", interpreter, *map(shlex.quote, left)]


if __name__ == "__main__":
    main()
